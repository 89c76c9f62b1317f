"""Run benchmarks that train at their smallest: the real system, a forced lag, two arms and a few steps."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.soak


@pytest.fixture
def measured(root, tmp_path):
    """Return a function that runs a benchmark, and returns what it printed and its results."""

    def run(name, *arguments):
        out = tmp_path / "out.jsonl"
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--out", str(out)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout, [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_the_loop_in_one_process_gives_what_the_real_system_gives(measured):
    shown, pairs = measured("frontier", "agree", "--cells", "1", "--steps", "24")
    assert [(pair["task"], pair["row"], pair["exact"]) for pair in pairs] == [("budget", "uncorrected", True)]
    assert "| budget | uncorrected | 0 |" in shown


def test_arms_take_turns_until_their_tokens_are_used(measured, tmp_path):
    plot = tmp_path / "plot.png"
    shown, runs = measured("claims", "--smoke", "--plot", str(plot))
    assert {run["arm"] for run in runs} == {"sum", "gdpo"}
    for run in runs:
        tokens = [tokens for tokens, *_ in run["curve"]]
        assert tokens[-2] < 1_000 <= tokens[-1]
        assert run["exact"]
        assert set(run["rewards"]) == {"right", "format", "short", "misleading", "heavy"}
    assert "| 1 of 5 | **not decided** |" in shown
    assert plot.stat().st_size > 10_000


def test_groups_with_hints_use_up_the_budget_too(measured):
    shown, runs = measured("claims", "--claims", "GHPO", "--seeds", "0", "--budget", "3000")
    runs = {run["arm"]: run for run in runs}
    assert set(runs) == {"grpo-dials", "ghpo"}
    assert all(run["exact"] for run in runs.values())
    plain, hinted = ([end[0] for end in runs[name]["curve"]] for name in ("grpo-dials", "ghpo"))
    assert min(plain[-1], hinted[-1]) >= 3_000
    # A batch has four groups of eight, and at first each lock asks for three groups with hints.
    assert hinted[0] > 2 * plain[0]
    assert "| 1 of 5 | **not decided** |" in shown
