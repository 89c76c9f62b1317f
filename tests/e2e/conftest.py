"""Runs of the real system: every role a process, through the command line."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """What a finished `offbeat train` left behind."""

    folder: Path
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def steps(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [m for m in map(json.loads, lines) if "learner/policy_version" in m]


@pytest.fixture
def root():
    return ROOT


@pytest.fixture
def train_command(tmp_path):
    """Function that gives the command line of `offbeat train` for a recipe, in a folder of the test's own."""

    def make(recipe: str, *overrides: str) -> list[str]:
        run_file = str(ROOT / "recipes" / f"{recipe}.toml")
        cache = ROOT / "runs" / "models"  # warm-started models are shared by all tests, and with `make train`
        settings = [f"run.dir={tmp_path}", "run.name=run", f"model.cache={cache}", *overrides]
        return [sys.executable, "-m", "launch.cli", "train", run_file, *settings]

    return make


@pytest.fixture
def offbeat(train_command, tmp_path):
    """Function that runs a recipe with overrides to its end."""

    def run(recipe: str, *overrides: str, timeout_s: float = 400.0) -> Run:
        done = subprocess.run(
            train_command(recipe, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
        logs = "".join(
            f"\n--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(tmp_path.glob("run/logs/*.log"))
        )
        assert done.returncode == 0, done.stdout + done.stderr + logs
        return Run(tmp_path / "run", done.stdout)

    return run
