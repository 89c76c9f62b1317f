"""Test when a run counts as one from which nothing can be learned."""

import json

import pytest

from learner.curriculum import SOLVED, SignalWatch
from learner.errors import NothingToLearn, Stopped
from learner.settings.learner import LearnerConfig
from protocol.messages.episodes import Failure
from tests.trajectories import make_trajectory

CONFIG = LearnerConfig(max_failed_episodes=64, max_uniform_groups=8, data_timeout_s=300.0)
KEY = Failure(kind="KeyError", message="'answer'", place="my_task.py:23")


def failed(failure=KEY):
    return make_trajectory("t", status="failed", failure=failure)


def test_a_run_whose_episodes_all_fail_ends_with_the_reason_and_the_cure():
    watch = SignalWatch()
    for _ in range(63):
        watch.episode(failed())
    watch.look(CONFIG, now=0.0)
    watch.episode(failed())
    with pytest.raises(NothingToLearn) as error:
        watch.look(CONFIG, now=0.0)
    assert str(error.value) == (
        "64 of 64 episodes failed, one after the other: KeyError: 'answer' in my_task.py:23; correct this, then start "
        "again (learner.max_failed_episodes is 64)"
    )


def test_half_of_the_episodes_may_fail():
    watch = SignalWatch()
    for _ in range(1_000):
        watch.episode(failed())
        watch.episode(make_trajectory("t"))
        watch.look(CONFIG, now=0.0)
    assert watch.failed_share == 0.5


def test_a_service_that_is_away_for_a_while_ends_no_run_that_has_worked():
    watch = SignalWatch()
    watch.episode(make_trajectory("t"))
    for _ in range(100):
        watch.episode(failed())
    watch.look(CONFIG, now=1_000.0)
    watch.look(CONFIG, now=1_299.0)
    with pytest.raises(NothingToLearn):
        watch.look(CONFIG, now=1_301.0)
    watch.episode(make_trajectory("t"))
    watch.look(CONFIG, now=1_302.0)


def test_a_success_before_the_first_step_buys_no_time_for_a_reward_that_fails_now():
    watch = SignalWatch()
    for _ in range(3):
        watch.episode(make_trajectory("t"))
    for _ in range(64):
        watch.episode(failed())
    watch.look(CONFIG, now=0.0, trained=True)
    with pytest.raises(NothingToLearn, match="64 of 64 episodes failed"):
        watch.look(CONFIG, now=0.0, trained=False)


def test_failures_of_the_infrastructure_end_no_run():
    watch = SignalWatch()
    for _ in range(1_000):
        watch.episode(failed(Failure(message="no generator", fault=False)))
    watch.look(CONFIG, now=0.0)


def test_a_run_whose_groups_all_have_equal_returns_ends_with_the_cure():
    watch = SignalWatch()
    for _ in range(8):
        watch.look(CONFIG, now=0.0)
        watch.group([0.0, 0.0], uniform=True)
    with pytest.raises(
        NothingToLearn, match=r"first 8 groups has equal returns \(0 in the last one\)"
    ) as error:
        watch.look(CONFIG, now=0.0)
    assert "make the reward depend on the answer" in str(error.value)
    assert "learner.max_uniform_groups is 8" in str(error.value)
    assert "\n" not in str(error.value)


def test_groups_of_which_only_one_member_does_not_fail_are_explained():
    watch = SignalWatch()
    for _ in range(8):
        for _ in range(3):
            watch.episode(failed())
        watch.episode(make_trajectory("t"))
        watch.group([1.0], uniform=True)
    with pytest.raises(NothingToLearn) as error:
        watch.look(CONFIG, now=0.0)
    assert str(error.value) == (
        "75% of episodes failed, and in each of the first 8 groups the others have equal returns: "
        "KeyError: 'answer' in my_task.py:23; correct this, then start again (learner.max_uniform_groups is 8)"
    )


def test_a_policy_that_solves_everything_ends_its_run_in_good_order():
    watch = SignalWatch()
    watch.group([0.0, 1.0], uniform=False)
    for _ in range(100):
        watch.group([1.0, 1.0], uniform=True)
    watch.look(CONFIG, now=0.0)
    watch.look(CONFIG, now=299.0)
    with pytest.raises(Stopped, match=f"{SOLVED}: 100 in a row with equal returns, 1 in the last one"):
        watch.look(CONFIG, now=301.0)


def test_groups_without_any_result_are_no_groups():
    watch = SignalWatch()
    watch.group([], uniform=False)
    assert watch.groups == 0


def test_the_counts_survive_a_checkpoint():
    watch = SignalWatch()
    watch.episode(failed())
    watch.episode(make_trajectory("t"))
    watch.group([0.0, 1.0], uniform=False)
    again = SignalWatch()
    again.restore(json.loads(json.dumps(watch.state())))
    assert again.state() == watch.state()
    assert again.failed.ever_broken
    assert again.uniform.ever_broken
