"""Jobs with families run through broker, actors, generator and learner; with hints, the learner is killed."""

import signal

import pytest

from launch.commands import retrain
from learner.intake.trajectories import assemble
from protocol import names
from protocol.codec import decode_delivery
from tests.e2e.test_faults import SETTINGS, Running

pytestmark = pytest.mark.timeout(900)


def test_a_job_with_hints_goes_on_where_its_learner_was_killed(train_command, root, tmp_path):
    # Long words are hard, so that there are groups that nobody solves.
    words = ("env.params.config.min_word_len=6", "env.params.config.max_word_len=8")
    command = train_command("methods/families/ghpo", *SETTINGS, *words, "learner.max_policy_lag=3")
    run = Running(command, root, tmp_path / "run")
    try:
        run.goes_on(3)
        run.replaced("learner", signal.SIGKILL)
        run.goes_on(3)
        summary = run.end()
    finally:
        run.kill()
    assert summary["restarts"]["learner"] == 1
    assert run.steps() == list(range(1, summary["steps"] + 1)), "each step is there once"
    assert summary["trajectories_by_outcome"]["unhinted"] > 0
    recorded = retrain.read_recording(run.folder / "journal")
    trained = [names.family_of(unit) for batch in recorded.batches.values() for unit in batch.trained]
    assert len(trained) == len(set(trained)), "each family is trained once"
    stages = {names.stage_of(unit) for batch in recorded.batches.values() for unit in batch.trained}
    assert stages - {0}, "groups with hints are trained"


def test_branches_begin_in_the_middle_of_sampled_episodes(offbeat):
    settings = (
        "learner.steps=4",
        "learner.evaluation_tasks=0",
        "run.max_minutes=6",
        "learner.keep_best=false",
    )
    run = offbeat("methods/families/arpo-branch", *settings)
    assert run.summary["steps"] == 4
    assert run.summary["episodes"]["failed"] == 0, run.summary["episodes"]
    last = run.steps[-1]
    assert last["family/diverged_prefixes"] == 0
    assert last["family/children"] > 0
    recorded = retrain.read_recording(run.folder / "journal")
    whole, branches = [], []
    for step in recorded.steps(recorded.last):
        for unit in step.units:
            by_id = {}
            for part in decode_delivery(unit.deliver, unit.frames):
                by_id.setdefault(part.segment.trajectory_id, []).append(part)
            stage = names.stage_of(unit.deliver.unit_id)
            (branches if stage else whole).extend(map(assemble, by_id.values()))
    begun = [
        t for t in branches if sum(not turn.action for turn in t.turns if turn.end <= t.prompt_tokens) > 1
    ]
    # Branches begin where the policy is unsure, so how many do depends on the processor on which its model was made.
    assert len(begun) > len(branches) / 8
    for t in begun:
        prefix = t.token_ids[: t.prompt_tokens].tolist()
        assert any(prefix == parent.token_ids[: len(prefix)].tolist() for parent in whole)
