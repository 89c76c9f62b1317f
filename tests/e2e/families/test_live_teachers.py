"""A whole run whose teacher is a real vLLM server of a second folder, beside one that is not there."""

import subprocess
import sys

import pytest

from launch.commands import retrain
from launch.model import _made, tiny_teacher
from launch.run_file.load import load
from protocol import names
from tests.e2e.conftest import ROOT, Run

pytestmark = [pytest.mark.timeout(1_500), pytest.mark.soak]

RUN = """
extends = "{recipe}"
[run]
name = "run"
dir = "{folder}"
max_minutes = 6.0
[model]
cache = "{cache}"
[judge]
model = "{teacher}"
[actor]
teachers = [
    {{ name = "big", url = "own" }},
    {{ name = "gone", url = "http://127.0.0.1:9/v1", model = "m", timeout_s = 1.0, rest_s = 5.0 }},
]
[learner]
steps = 8
max_policy_lag = 4
evaluation_tasks = 0
keep_best = false
[learner.family]
kind = "taught"
teachers = ["big", "gone"]
[learner.algorithm]
aggregation = {{ kind = "fixed" }}
advantage = {{ kind = "group", scale = "none" }}
[[learner.algorithm.by_origin]]
origin = "taught"
surrogate = {{ kind = "shaped" }}
"""


def test_a_teacher_answers_what_nobody_solved_and_one_that_is_gone_stops_nothing(tmp_path):
    recipe, cache = ROOT / "recipes" / "spell_backward.toml", ROOT / "runs" / "models"
    job = load(recipe, [f"model.cache={cache}"])
    teacher = _made(job, tiny_teacher(job))
    file = tmp_path / "live.toml"
    file.write_text(RUN.format(recipe=recipe, folder=tmp_path, cache=cache, teacher=teacher))
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "train", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = Run(tmp_path / "run", done.stdout)
    assert run.summary["steps"] == 8
    assert sum(step.get("learner/taught_tokens", 0) for step in run.steps) > 0
    shares = [step["family/taught_group_share"] for step in run.steps if "family/taught_group_share" in step]
    assert 0 < sum(shares) / len(shares) < 1
    last = run.steps[-1]
    assert last["actor/teacher_answers_total"] > 0
    assert last["actor/teacher_failures_total"] > 0
    assert "teacher gone" in (tmp_path / "run" / "summary.json").read_text() + done.stdout
    batches = retrain.read_recording(run.folder / "journal").batches
    stages = [{names.stage_of(unit) for unit in batch.trained} for batch in batches.values() if batch.trained]
    assert {0, 1} in stages
