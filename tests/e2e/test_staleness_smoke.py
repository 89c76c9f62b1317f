"""Run the staleness benchmark at its smallest: the real system, a forced lag, two recipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_the_lag_is_what_it_is_forced_to_be(tmp_path):
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.staleness", "--smoke"),
            *("--out", str(out), "--plot", str(plot), "--curves", str(tmp_path / "curves")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = {(r["recipe"], r["lag"]): r for r in map(json.loads, out.read_text().splitlines())}
    assert set(results) == {(recipe, lag) for recipe in ("grpo", "decoupled-ppo") for lag in (0, 2)}
    for (_, lag), result in results.items():
        assert set(result["tokens_by_lag"]) == {str(n) for n in range(lag + 1)}
        assert result["exact"]
        assert result["score"] > 0
    assert "| decoupled-ppo | 1.00 |" in done.stdout
    assert plot.stat().st_size > 10_000
    pictures = sorted((tmp_path / "curves").iterdir())
    assert [path.name for path in pictures] == ["decoupled-ppo.png", "grpo.png"]
    assert all(path.stat().st_size > 5_000 for path in pictures)
