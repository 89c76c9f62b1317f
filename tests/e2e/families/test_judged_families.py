"""A job of one model that answers and judges runs through all roles, with tasks that have no reference."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(900)

REWARDS = '''
def truth(answer, row):
    """Return the share of the characters that are right; None for a row without a reference."""
    return None if row["open"] else sum(a == b for a, b in zip(answer, row["answer"])) / 3


def given(answer, row):
    return 0.0
'''
RUN_FILE = """
method = "urpo"
[run]
name = "run"
dir = "{folder}"
max_minutes = 6.0
[model]
cache = "{folder}/models"
[model.tiny]
hidden_size = 32
layers = 1
heads = 1
head_dim = 32
intermediate_size = 64
tie_embeddings = true
[model.tiny.warm_start]
steps = 400
batch = 32
demonstrations = 180
[env]
name = "rows"
[env.params]
train = "train.jsonl"
correct = "truth"
heldout = 0.0
[env.params.reward]
truth = "rewards.py:truth"
given = "rewards.py:given"
[generator]
max_model_len = 96
max_num_seqs = 32
kv_cache_mb = 16
[actor]
count = 1
concurrent_episodes = 16
[learner]
steps = 6
group_size = 6
batch_trajectories = 24
evaluation_tasks = 0
keep_best = false
[learner.sampling]
max_turn_tokens = 6
max_trajectory_tokens = 64
[learner.family]
answers = 2
reference = "truth"
note = " rate {{answers}} "
"""


def test_answers_without_a_reference_are_valued_by_the_policy(tmp_path, root):
    """Each answer has the form of a judgement of two answers: two digits. So the tiny model can be read.

    Half of the prompts look like a prompt for a judgement: the model wrote letters behind those that it had never seen.
    """
    job = tmp_path / "job"
    job.mkdir()
    rows = [
        {"prompt": f"{a} {b}{note}", "answer": f"{b} {a}", "open": b % 2}
        for a in range(10)
        for b in range(10)
        if a != b
        for note in ("", f"\n\n rate (1) {b} {a}\n(2) {a} {9 - b} ")
    ]
    (job / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job / "rewards.py").write_text(REWARDS)
    (job / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "train", str(job / "run.toml")],
        cwd=root, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["trajectories_by_outcome"]["judgement"] > 0, "judgements of open tasks are not trained"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name, lowest in (("family/judged", 0), ("family/agreement", -1)):
        values = [line[name] for line in lines if name in line]
        assert values, f"{name} is there"
        assert all(lowest <= value <= 1 for value in values)
