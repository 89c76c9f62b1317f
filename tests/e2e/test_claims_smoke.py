"""Run the benchmark of claims at its smallest: the real system, two arms, a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_arms_take_turns_until_their_tokens_are_used(tmp_path):
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.claims", "--smoke", "--out", str(out), "--plot", str(plot)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = {run["arm"]: run for run in map(json.loads, out.read_text().splitlines())}
    assert set(runs) == {"sum", "gdpo"}
    for run in runs.values():
        tokens = [tokens for tokens, _, _ in run["curve"]]
        assert tokens[-2] < 1_000 <= tokens[-1]
        assert run["exact"]
        assert set(run["rewards"]) == {"right", "format", "short", "misleading", "heavy"}
    assert "| 1 of 5 | **not decided** |" in done.stdout
    assert plot.stat().st_size > 10_000
