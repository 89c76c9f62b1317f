"""A run with formulas of the user's own, by the command line: train, retrain bit for bit, resume with another file."""

import json
import os
import subprocess
import sys

import pytest

from tests.pages import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

JOB = """
[run]
name = "own"
[model.tiny]
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 1
[model.tiny.warm_start]
steps = 0
[env]
name = "rows"
[env.params]
train = "train.jsonl"
reward = "rewards.py:digits"
[generator]
max_model_len = 128
kv_cache_mb = 16
[learner]
steps = 2
batch_trajectories = 8
group_size = 4
evaluation_tasks = 0
[learner.sampling]
max_turn_tokens = 8
[learner.algorithm]
corrections = [{ kind = "formulas.py:truncated", ceiling = 3.0 }]
advantage = { kind = "formulas.py:group" }
surrogate = { kind = "formulas.py:clip", centre = "proximal" }
[learner.reward.own]
kind = "formulas.py:as_given"
"""


@pytest.fixture
def offbeat(tmp_path):
    """Return a function that runs a command in a folder with the job, and returns what it said."""
    rows = [json.dumps({"prompt": f"Say digits, {number}.", "answer": "12345"}) for number in range(64)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "rewards.py").write_text(
        "def digits(answer, row):\n    return sum(map(str.isdigit, answer)) / 8 + len(answer)\n"
    )
    (tmp_path / "formulas.py").write_text((ROOT / "tests" / "own_formulas.py").read_text())
    (tmp_path / "job.toml").write_text(JOB)

    def run(*words):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", *words],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_a_run_with_own_formulas(offbeat, tmp_path):
    offbeat("train", "job.toml", "--in-process")
    run = tmp_path / "runs" / "own"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    own = json.loads((run / "config.json").read_text())["learner"]["algorithm"]["surrogate"]
    assert (own["kind"], own["centre"], len(own["content"])) == (
        f"{tmp_path}/formulas.py:clip",
        "proximal",
        16,
    )
    assert "equal to those of the run, bit for bit" in offbeat("retrain", "runs/own")
    with (tmp_path / "formulas.py").open("a") as file:
        file.write("\n# changed\n")
    said = offbeat("train", "job.toml", "--in-process", "--resume", "--changed", "learner.steps=3")
    assert "the file of the formula of learner.algorithm.surrogate has changed" in said
    notes = [json.loads(line).get("note", "") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(note.startswith("the file of learner.algorithm.surrogate has changed: ") for note in notes)
