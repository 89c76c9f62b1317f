"""The shipped jobs of families and of replay run through all roles, and do what they are named for."""

import subprocess
import sys

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
    shares = [step["family/readable_share"] for step in run.steps if "family/readable_share" in step]
    assert sum(shares) / len(shares) > 0.5
    assert any(step["family/agreement"] > -1 for step in run.steps if "family/agreement" in step)


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


FROZEN = '{name="frozen", url="own", max_tokens=12, temperature=1.0, timeout_s=600.0, rest_s=0.0}'
VERDICTS = {
    "policy": ["learner.family.from_version=2", "learner.steps=8"],
    # The model of [judge] is that with which the run starts, so version 0 of the policy judges to the end.
    "pinned": [
        *("learner.family.from_version=0", "learner.steps=8"),
        *("judge.threads=1", f"actor.teachers=[{FROZEN}]", "learner.family.judge=frozen"),
    ],
}


@pytest.mark.parametrize("judge", VERDICTS)
def test_steps_with_verdicts_are_trained_again_bit_for_bit(offbeat, judge):
    # A judge is a second engine, which starts slowly on a busy machine.
    run = offbeat("methods/families/fapo", *SETTINGS, *VERDICTS[judge], "run.max_minutes=11", timeout_s=800)
    said = [step for step in run.steps if "family/readable_share" in step]
    assert sum(step["family/readable_share"] for step in said) / len(said) > 0.5
    assert any(step.get("family/flawed_share", 0.0) > 0 for step in said)
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "retrain", str(run.folder)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "equal to those of the run, bit for bit" in done.stdout, done.stdout + done.stderr[-3000:]


ACTS = {
    "methods/families/agent-r": "family/retried_right_share",
    "methods/families/arpo-branch": "family/branched_share",
    "methods/families/fapo": "family/flawed_share",
    "methods/families/dyna-mind": "family/refined_share",
    "methods/families/ghpo": "family/hinted_right_share",
    "methods/families/icpo": "learner/guided_tokens",
    "methods/families/igrpo": "family/improved_share",
    "methods/families/r3l": "family/named_share",
    "methods/families/scaf-grpo": "family/hinted_right_share",
    "methods/families/xrpo-seeding": "family/guided_right_share",
    "methods/credit/arpo-gui": "replay/share",
    "methods/objectives/aepo-agentic": "family/branched_share",
    "methods/objectives/ampo": "learner/taught_tokens",
    "methods/objectives/srpo": "learner/distilled_share",
    "methods/objectives/rapo": "replay/share",
    "methods/objectives/spear": "replay/share",
    "methods/selection/dots": "replay/share",
    "methods/selection/deeptravel": "selection/failed_share",
    "methods/selection/inspo-proposals": "selection/proposed_share",
    "methods/selection/xrpo": "family/guided_right_share",
    "methods/selection/vspo": "selection/damped_share",
}
"""Recipes, each with the metric that is above 0 in a step in which its named part acts."""


SOAK = ("methods/selection/",)
"""Beginnings of those that are tried in `make soak` alone."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.soak] if name.startswith(SOAK) else []) for name in ACTS]
)
def test_the_named_part_acts_on_the_job_that_shows_it(offbeat, recipe):
    settings = [*SETTINGS, "learner.steps=24", "run.max_minutes=8"]
    # Hints of scaf-grpo begin after a warm-up of groups, and judgements of fapo after one of versions.
    warm = {"scaf-grpo": ["learner.family.warmup_groups=0"], "fapo": ["learner.family.from_version=4"]}
    # SPEAR's table fires when it is full of what is not older than ten versions, which small batches never reach.
    longer = ["learner.batch_trajectories=128"] if recipe.endswith("spear") else []
    run = offbeat(recipe, *settings, *warm.get(recipe.rpartition("/")[2], []), *longer, timeout_s=800)
    values = [step.get(ACTS[recipe], 0.0) for step in run.steps]
    assert sum(value > 0 for value in values) >= len(values) / 20, values


def test_some_retries_behind_a_reflection_are_right(offbeat):
    run = offbeat("methods/families/r3l", *SETTINGS, "learner.steps=16", timeout_s=800)
    assert any(step.get("family/retried_right_share", 0.0) > 0 for step in run.steps)


@pytest.mark.soak
def test_the_instruction_that_helps_gets_most_groups(offbeat):
    """Over the run it has more groups than all others together; drawn alike it would have a sixth."""
    run = offbeat(
        "methods/selection/inspo", *SETTINGS, "learner.steps=60", "run.max_minutes=8", timeout_s=800
    )
    assert run.summary["episodes"]["failed"] == 0, run.summary["episodes"]
    best = [(s["selection/best_instruction"], s["selection/best_instruction_share"]) for s in run.steps]
    assert sum(share for place, share in best if place == 0) / len(best) > 0.5, best
