"""A job with hints runs through broker, actors, generator and learner; the learner is killed in the middle."""

import signal

import pytest

from launch.commands import recording
from protocol import names
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
    recorded = recording.read(run.folder / "journal")
    trained = [names.family_of(unit) for batch in recorded.batches.values() for unit in batch.trained]
    assert len(trained) == len(set(trained)), "each family is trained once"
    stages = {names.stage_of(unit) for batch in recorded.batches.values() for unit in batch.trained}
    assert stages - {0}, "groups with hints are trained"
