"""A run from which nothing can be learned says so and ends with an error; a run that half fails says so, too."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.e2e.broken_task import FAULT

pytestmark = pytest.mark.timeout(600)

RUN_FILE = """
[run]
name = "run"
dir = "{folder}"
max_minutes = 8.0
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
steps = 60
batch = 32
demonstrations = 200
[env]
name = "tests/e2e/broken_task.py:Suite"
[generator]
max_model_len = 64
max_num_seqs = 32
kv_cache_mb = 16
[actor]
concurrent_episodes = 16
[learner]
steps = {steps}
group_size = 4
batch_trajectories = 16
evaluation_tasks = 16
evaluation_every = 4
[learner.sampling]
max_turn_tokens = 12
max_trajectory_tokens = 48
"""


@pytest.fixture
def broken(tmp_path, root):
    """Return a function that trains on the broken task with a fault, and returns the process and seconds of it."""

    def train(fault, steps=400):
        cache = root / "runs" / "models"
        path = tmp_path / "run.toml"
        path.write_text(RUN_FILE.format(folder=tmp_path, cache=cache, steps=steps))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", "train", str(path)],
            cwd=root, capture_output=True, text=True, timeout=500, env={**os.environ, FAULT: fault},
        )  # fmt: skip
        return done, time.monotonic() - began, done.stdout + done.stderr

    return train


def seconds_of(output, pattern):
    """Return the times, by the clock of the terminal, of the lines that match."""
    return [int(m[1]) for m in re.finditer(rf"^\[ *(\d+) s\] .*{pattern}", output, re.MULTILINE)]


def test_a_reward_that_always_raises_ends_the_run_within_a_minute(broken, tmp_path):
    done, took, output = broken("raises")
    assert done.returncode not in (0, None), output
    reason = r"KeyError: 'answer' in tests/e2e/broken_task\.py:\d+"
    assert re.search(rf"episodes failed, one after the other: {reason}", output), output
    first = seconds_of(output, reason)
    assert took - first[0] < 150 if first else took < 300, output
    for path in (tmp_path / "run" / "logs").glob("actor-*.log"):
        log = path.read_text()
        assert log.count("Traceback (most recent call last)") == 1, log
        assert "in answer_of" in log


def test_a_constant_reward_ends_the_run_within_a_minute(broken):
    done, _, output = broken("constant")
    assert done.returncode not in (0, None), output
    assert "groups has equal returns (0 in the last one)" in output
    assert "make the reward depend on the answer" in output


def test_a_run_in_which_half_fails_says_so_in_line_and_table(broken):
    # Long enough for several progress lines.
    done, _, output = broken("half raises", steps=80)
    assert done.returncode == 0, output
    reason = r"KeyError: 'answer' in tests/e2e/broken_task\.py:\d+"
    assert re.search(rf"\| failed \d+ %: {reason}", output), output
    # The table breaks its lines.
    assert re.search(r"│ episodes +│ [\d,]+, failed \d+ %: KeyError: 'answer'", output), output
    assert re.search(r"\] evaluation at step 4: held-out return \d\.\d+ \(\d+ tasks answered", output), output
