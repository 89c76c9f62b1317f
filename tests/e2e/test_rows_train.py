"""A jsonl file and reward functions in TRL's form train a model, with nothing but a run file beside them."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)

REWARDS = """
import re


def reward_func(completions, ground_truth, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [sum(a == b for a, b in zip(c, gt)) / len(gt) for c, gt in zip(contents, ground_truth)]


async def format_reward_func(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^.*[a-h]", content) else 0.0 for content in completion_contents]
"""
RUN_FILE = """
[run]
name = "run"
dir = "{folder}"
max_minutes = 6.0
[model]
cache = "{cache}"
[model.tiny]
hidden_size = 32
layers = 1
heads = 1
head_dim = 32
intermediate_size = 64
tie_embeddings = true
[model.tiny.warm_start]
steps = 120
batch = 32
demonstrations = 200
[env]
name = "rows"
[env.params]
train = "train.jsonl"
correct = "letters"
[env.params.reward]
letters = "rewards.py:reward_func"
format = "rewards.py:format_reward_func"
[learner.reward.weights]
format = 0.25
[generator]
max_model_len = 64
max_num_seqs = 32
kv_cache_mb = 16
[actor]
count = 2
concurrent_episodes = 16
[learner]
steps = 6
group_size = 4
batch_trajectories = 16
filter_uniform_groups = false
[learner.sampling]
max_turn_tokens = 12
max_trajectory_tokens = 48
"""


def rows():
    """Return 24 rows: spell three letters twice."""
    for i in range(24):
        letters = "abcdefgh"[i % 8] + "abcdefgh"[i // 8] + "h"
        prompt = [{"role": "user", "content": letters}]
        yield {"prompt": prompt, "ground_truth": letters * 2, "answer": letters * 2}


def test_a_jsonl_file_and_two_reward_functions_of_trl_train_a_model(tmp_path, root):
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (job / "rewards.py").write_text(REWARDS)
    (job / "run.toml").write_text(RUN_FILE.format(folder=tmp_path, cache=tmp_path / "models"))
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "train", str(job / "run.toml")],
        cwd=root, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["episodes"]["failed"] == 0, summary["episodes"]
    # The default of 256 held-out tasks is more than there are.
    held = summary["evaluations"][0]["tasks"]
    assert f"there are {held} held-out tasks" in output
    assert 0 < held < 12
    assert set(summary["evaluations"][-1]["rewards"]) == {"letters", "format"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Nothing may arrive between two steps.
    steps = [line for line in lines if "rollout/return_mean" in line]
    assert steps
    for line in steps:
        weighted = line["reward/letters"] + 0.25 * line["reward/format"]
        assert line["rollout/return_mean"] == pytest.approx(weighted)
    assert any(line["reward/format"] > 0 for line in steps)
    out = tmp_path / "out.jsonl"
    take = ["journal", "export", str(tmp_path / "run"), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "launch.cli", *take], cwd=root, check=True, timeout=120)
    recorded = [reward for line in out.read_text().splitlines() for reward in json.loads(line)["rewards"]]
    values = {reward["value"] for reward in recorded if reward["name"] == "format"}
    assert {1.0} <= values <= {0.0, 1.0}, "the journal has rewards without weights"
