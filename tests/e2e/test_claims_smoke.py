"""Run the benchmark of claims at its smallest: the real system, two arms, a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[2]


def measured(tmp_path, *arguments):
    """Run the benchmark. Return what it printed, and its runs by arm."""
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.claims", *arguments, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, {run["arm"]: run for run in map(json.loads, out.read_text().splitlines())}


def test_arms_take_turns_until_their_tokens_are_used(tmp_path):
    plot = tmp_path / "plot.png"
    shown, runs = measured(tmp_path, "--smoke", "--plot", str(plot))
    assert set(runs) == {"sum", "gdpo"}
    for run in runs.values():
        tokens = [tokens for tokens, *_ in run["curve"]]
        assert tokens[-2] < 1_000 <= tokens[-1]
        assert run["exact"]
        assert set(run["rewards"]) == {"right", "format", "short", "misleading", "heavy"}
    assert "| 1 of 5 | **not decided** |" in shown
    assert plot.stat().st_size > 10_000


def test_groups_with_hints_use_up_the_budget_too(tmp_path):
    shown, runs = measured(tmp_path, "--claims", "GHPO", "--seeds", "0", "--budget", "3000")
    assert set(runs) == {"grpo-dials", "ghpo"}
    assert all(run["exact"] for run in runs.values())
    plain, hinted = ([end[0] for end in runs[name]["curve"]] for name in ("grpo-dials", "ghpo"))
    assert min(plain[-1], hinted[-1]) >= 3_000
    # A batch has four groups of eight, and at first each lock asks for three groups with hints.
    assert hinted[0] > 2 * plain[0]
    assert "| 1 of 5 | **not decided** |" in shown
