"""Every step of `benchmarks.gpu` works: each runs tiny, on the CPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.program import STEPS

ROOT = Path(__file__).parents[3]
EXPECTED = {
    "ceilings": {"matrix product, float32", "device to host, pinned", "host to device, pageable"},
    "learner": {
        "tiny, rows of 32: learner step, chunks of 2^25",
        "tiny, rows of 32: learner step, chunks of 2^29",
    },
    "publish": {"publish 6.55e-05 GB: learner stands", "publish 6.55e-05 GB: announced"},
    "load": {"load 6.55e-05 GB: through pinned buffers", "load 6.55e-05 GB: from the mapped file"},
    "generation": {
        "tiny, without graphs: 4 requests",
        "tiny, without graphs: pause for a load",
        "tiny, without graphs: gap to float32 after the loads, mean",
    },
}


def run(step, out):
    """Run a step, and return its figures by name."""
    options = ["--steps", step, "--device", "cpu", "--tiny", "--repetitions", "2", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240.0, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {figure["name"]: figure for figure in json.loads((out / f"{step}.json").read_text())}


def test_each_step_is_tested_here():
    assert set(EXPECTED) == set(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["ceilings", "learner", "publish", "load"])
def test_a_step_runs_tiny_on_a_cpu(tmp_path, step):
    figures = run(step, tmp_path)
    assert set(figures) >= EXPECTED[step]
    assert all(value > 0 for figure in figures.values() for value in figure["values"])
    if step != "ceilings":
        timed = [figure for figure in figures.values() if "memory" not in figure["name"]]
        assert all(len(figure["values"]) == len(figure["bare"]) == 2 for figure in timed)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.soak
def test_the_engine_runs_tiny_on_a_cpu_and_agrees_with_the_learner(tmp_path):
    figures = run("generation", tmp_path)
    assert set(figures) >= EXPECTED["generation"]
    gaps = {name: figure["values"][0] for name, figure in figures.items() if name.endswith(", mean")}
    assert len(gaps) == 2
    assert all(gap < 1e-4 for gap in gaps.values()), "in float32 both sides compute the same"
