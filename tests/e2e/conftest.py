"""Fixtures that run the real system from the command line, each role in its own process."""

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
    """The folder and the output of a finished `offbeat train`."""

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
    """Return a function that builds an `offbeat train` command line for a recipe, in the test's folder."""

    def make(recipe: str, *overrides: str) -> list[str]:
        run_file = str(ROOT / "recipes" / f"{recipe}.toml")
        # All tests and `make train` share the warm-started models.
        cache = ROOT / "runs" / "models"
        settings = [f"run.dir={tmp_path}", "run.name=run", f"model.cache={cache}", *overrides]
        return [sys.executable, "-m", "launch.cli", "train", run_file, *settings]

    return make


@pytest.fixture
def offbeat(train_command, tmp_path):
    """Return a function that runs a recipe, with overrides, until it ends."""

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
