"""Every step of `benchmarks.gpu` works: each runs tiny, on the CPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.program import STEPS
from benchmarks.gpu.training import ARMS

ROOT = Path(__file__).parents[3]
EXPECTED = {
    "ceilings": {"matrix product, float32", "device to host, pinned", "host to device, pageable"},
    "learner": {
        "tiny, rows of 32: learner step, chunks of 2^25",
        "tiny, rows of 32: learner step, chunks of 2^28",
        "tiny, rows of 32, with gradient checkpointing: learner step, chunks of 2^30",
        "tiny, rows up to 32: padding of the learner",
    },
    "attention": {
        "attention of tiny, one row of 64: torch's choice",
        "attention of tiny, one row of 64: plain",
    },
    "gradients": {
        "tiny, 4 micro-batches of 24 tokens: error of the sums",
        "tiny, 4 micro-batches of 24 tokens: error of the gradient, to float32",
    },
    "publish": {"publish 6.55e-05 GB: learner stands", "publish 6.55e-05 GB: announced"},
    "load": {"load 6.55e-05 GB: through pinned buffers", "load 6.55e-05 GB: from the file as it is"},
    "generation": {
        "tiny, without graphs: 4 requests",
        "tiny, without graphs: pause for a load",
        "tiny, without graphs: gap to float32 after the loads, mean",
    },
    "updates": {
        f"tiny, 4 running requests of 48 tokens and more, cache {kind}: {figure}"
        for kind in ("kept", "recomputed")
        for figure in ("cost of an update", "tokens lost to an update")
    },
    "system": {"tiny, chunks of 16: 8 episodes, broker to actor"},
    "training": {f"tiny, learner and generator on one device: {arm}" for arm in ARMS},
}


def run(step, out):
    """Run a step, and return its figures by name."""
    options = ["--steps", step, "--device", "cpu", "--tiny", "--repetitions", "2", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580.0, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {figure["name"]: figure for figure in json.loads((out / f"{step}.json").read_text())}


def test_each_step_is_tested_here():
    assert set(EXPECTED) == set(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        "learner",
        *(
            pytest.param(step, marks=pytest.mark.soak)
            for step in ("ceilings", "attention", "publish", "load")
        ),
    ],
)
def test_a_step_runs_tiny_on_a_cpu(tmp_path, step):
    figures = run(step, tmp_path)
    assert set(figures) >= EXPECTED[step]
    assert all(value > 0 for figure in figures.values() for value in figure["values"])
    timed = [figure for figure in figures.values() if figure["beside"] and "memory" not in figure["name"]]
    assert step == "ceilings" or timed
    assert all(len(figure["values"]) == len(figure["bare"]) == 2 for figure in timed)


@pytest.mark.slow
def test_the_learner_sums_gradients_without_loss(tmp_path):
    figures = run("gradients", tmp_path)
    assert set(figures) == EXPECTED["gradients"]
    sums, whole = figures.values()
    assert sums["values"][0] < 1e-6 < 1e-3 < sums["bare"][0]
    # Both have the rounding of each pass in bfloat16, and the bare sums have their own beside it.
    assert 1e-3 < whole["values"][0] < whole["bare"][0]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("step", ["updates", "system", "training"])
def test_a_step_with_engines_runs_tiny_on_a_cpu(tmp_path, step):
    figures = run(step, tmp_path)
    assert set(figures) == EXPECTED[step]
    assert all(figure["values"] for figure in figures.values())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.soak
def test_the_engine_runs_tiny_on_a_cpu_and_agrees_with_the_learner(tmp_path):
    figures = run("generation", tmp_path)
    assert set(figures) >= EXPECTED["generation"]
    gaps = {name: figure["values"][0] for name, figure in figures.items() if name.endswith(", mean")}
    assert len(gaps) == 2
    assert all(gap < 1e-4 for gap in gaps.values()), "in float32 both sides compute the same"
