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


PINNED = """
extends = "{recipe}"
[run]
name = "run"
dir = "{folder}"
max_minutes = 8.0
[model]
cache = "{cache}"
[judge]
[actor]
teachers = [{{ name = "frozen", url = "own", max_tokens = 12, timeout_s = 600.0, rest_s = 0.0 }}]
[learner]
steps = 8
batch_trajectories = 32
evaluation_tasks = 0
keep_best = false
[learner.family]
judge = "frozen"
from_version = 0
"""


def test_verdicts_of_a_judge_that_stays_as_the_run_began(tmp_path):
    """The model of [judge] is that with which the run starts, so the judge is version 0 of the policy, for ever."""
    recipe, cache = ROOT / "recipes/methods/families/fapo.toml", ROOT / "runs" / "models"
    file = tmp_path / "pinned.toml"
    file.write_text(PINNED.format(recipe=recipe, folder=tmp_path, cache=cache))
    run = trained(file)
    assert run.summary["steps"] == 8
    said = [step for step in run.steps if "family/readable_share" in step]
    assert sum(step["family/readable_share"] for step in said) / len(said) > 0.5
    assert any(step.get("family/flawed_share", 0.0) > 0 for step in said)
    again = subprocess.run(
        [sys.executable, "-m", "launch.cli", "retrain", str(run.folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert "equal to those of the run, bit for bit" in again.stdout, again.stdout + again.stderr[-3000:]


def trained(file):
    """Return the run of a run file."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "train", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Run(file.parent / "run", done.stdout)


def test_a_teacher_answers_what_nobody_solved_and_one_that_is_gone_stops_nothing(tmp_path):
    recipe, cache = ROOT / "recipes" / "spell_backward.toml", ROOT / "runs" / "models"
    job = load(recipe, [f"model.cache={cache}"])
    teacher = _made(job, tiny_teacher(job))
    file = tmp_path / "live.toml"
    file.write_text(RUN.format(recipe=recipe, folder=tmp_path, cache=cache, teacher=teacher))
    run = trained(file)
    assert run.summary["steps"] == 8
    assert sum(step.get("learner/taught_tokens", 0) for step in run.steps) > 0
    shares = [step["family/taught_group_share"] for step in run.steps if "family/taught_group_share" in step]
    assert 0 < sum(shares) / len(shares) < 1
    last = run.steps[-1]
    assert last["actor/teacher_answers_total"] > 0
    assert last["actor/teacher_failures_total"] > 0
    assert "teacher gone" in (run.folder / "summary.json").read_text() + run.output
    batches = retrain.read_recording(run.folder / "journal").batches
    stages = [{names.stage_of(unit) for unit in batch.trained} for batch in batches.values() if batch.trained]
    assert {0, 1} in stages
