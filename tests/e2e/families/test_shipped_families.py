"""The shipped jobs whose second group reads the first one run through all roles."""

import pytest

from launch.commands import retrain
from protocol import names

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]

SETTINGS = (
    "learner.steps=4",
    "learner.batch_trajectories=32",
    "learner.evaluation_tasks=0",
    "learner.keep_best=false",
    "run.max_minutes=6",
)


def trained_stages(folder):
    """Return the stages of the groups that each step trained."""
    batches = retrain.read_recording(folder / "journal").batches
    return [{names.stage_of(unit) for unit in batch.trained} for batch in batches.values() if batch.trained]


def test_one_model_answers_and_judges(offbeat):
    run = offbeat("methods/families/urpo", *SETTINGS)
    assert run.summary["steps"] == 4
    assert run.summary["episodes"]["failed"] == 0, run.summary["episodes"]
    assert {0, 1} in trained_stages(run.folder), "answers and judgements are trained"
    assert all(-1 <= step["family/agreement"] <= 1 for step in run.steps if "family/agreement" in step)
    assert any("family/agreement" in step for step in run.steps)


def test_answers_have_room_behind_a_draft(offbeat):
    run = offbeat("methods/families/igrpo", *SETTINGS)
    assert run.summary["steps"] == 4
    assert run.summary["episodes"]["failed"] == 0, run.summary["episodes"]
    assert set().union(*trained_stages(run.folder)) == {1}, "no draft is trained"


def test_episodes_are_refined_by_what_really_followed(offbeat):
    run = offbeat("methods/families/dyna-mind", *SETTINGS)
    assert run.summary["steps"] == 4
    assert run.summary["episodes"]["failed"] == 0, run.summary["episodes"]
    assert {0, 1} in trained_stages(run.folder), "plain and refined episodes are trained"
    assert run.steps[-1]["family/children"] > 0
    assert any("family/refined_share" in step for step in run.steps)
