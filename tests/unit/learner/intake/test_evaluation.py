"""Test what an evaluation says when tasks fail, are never run, or have no right answer."""

import json

import pytest

from learner.gauges import declared
from learner.intake.evaluation import result_of
from learner.settings.learner import EvaluationConfig
from protocol.messages.episodes import Failure
from tests.trajectories import make_trajectory

SOLVED = make_trajectory("t", correct=True, reward=1.0)
WRONG = make_trajectory("t", correct=False, reward=0.5)
RAISED = make_trajectory(
    "t", status="failed", failure=Failure(kind="KeyError", message="'a'", place="t.py:3")
)
LOST = make_trajectory("t", status="failed", failure=Failure(message="no generator", fault=False))


def test_what_the_model_or_the_environment_failed_is_wrong_and_has_no_return():
    result = result_of([SOLVED, SOLVED, SOLVED, WRONG, RAISED, RAISED])
    assert (result.accuracy, result.return_mean) == (0.5, 0.875)
    assert (result.tasks, result.answered, result.failed, result.not_run) == (6, 4, 2, 0)
    assert result.sentence() == (
        "accuracy 0.500, return 0.875 (4 of 6 tasks answered, 2 failed: KeyError: 'a' in t.py:3)"
    )


LATE = make_trajectory(
    "t", status="failed", error="the episode took longer than its deadline of 9 s", reward=1.0, correct=True
)


def test_an_answer_that_was_too_late_is_wrong_whatever_came_before():
    assert result_of([SOLVED, LATE]).accuracy == 0.5
    assert result_of([SOLVED] * 40 + [LOST]).accuracy == 1.0, "nobody can say what was never run"


def test_a_set_with_several_answers_has_pass_at_k():
    of = EvaluationConfig(tasks=3, samples=4, pass_at=(1, 2, 4))
    one, none, three = [SOLVED] + [WRONG] * 3, [WRONG] * 2 + [RAISED] * 2, [SOLVED] * 3 + [WRONG]
    result = result_of([*one, *none, *three], of)
    assert result.accuracy == pytest.approx((1 / 4 + 0 + 3 / 4) / 3)
    values = {k: estimate.value for k, estimate in result.pass_at.items()}
    assert values == pytest.approx({1: 1 / 3, 2: (1 / 2 + 0 + 1) / 3, 4: 2 / 3})
    assert all(e.low < e.value < e.high for e in result.pass_at.values())
    assert (result.tasks, result.samples, result.answered, result.failed) == (3, 4, 10, 2)
    assert result.sentence() == (
        "accuracy 0.333, pass@2 0.500, pass@4 0.667, return 0.700 "
        "(10 of 3 x 4 answers came, 2 failed: KeyError: 'a' in t.py:3)"
    )
    assert result.scalars("hard") == {
        "evaluation/hard/answered": 10.0, "evaluation/hard/failed": 2.0, "evaluation/hard/not_run": 0.0,
        "evaluation/hard/accuracy": result.accuracy, "evaluation/hard/return_mean": pytest.approx(0.7),
        "evaluation/hard/pass_at_2": 0.5, "evaluation/hard/pass_at_4": pytest.approx(2 / 3),
    }  # fmt: skip
    assert {declared(name).unit for name in result.scalars("hard")} == {"answers", "share", "reward"}


def test_a_task_with_too_few_answers_has_no_pass_at_k():
    of = EvaluationConfig(tasks=30, samples=2)
    result = result_of([SOLVED, WRONG] * 29 + [SOLVED, None], of)
    assert result.accuracy == pytest.approx((29 / 2 + 1) / 30)
    assert result.pass_at[2].value == 1.0, "over the 29 tasks with two answers"


def test_the_rewards_are_reported_by_name():
    assert result_of([SOLVED, WRONG]).rewards == {"score": 0.75}
    record = result_of([SOLVED, WRONG]).record(tag="before", step=0, policy_version=3)
    assert json.loads(json.dumps(record)) == record
    assert (record["set"], record["samples"], record["accuracy"]) == ("", 1, 0.5)


def test_up_to_five_in_a_hundred_tasks_may_be_lost():
    result = result_of([SOLVED] * 95 + [LOST] * 3 + [None] * 2)
    assert (result.accuracy, result.not_run, result.missing) == (1.0, 5, False)
    result = result_of([SOLVED] * 94 + [LOST] * 3 + [None] * 3)
    assert (result.accuracy, result.return_mean, result.missing) == (None, None, True)
    assert result.sentence() == "no result (94 of 100 tasks answered, 6 never run: no generator)"
    assert result.scalars() == {
        "evaluation/answered_tasks": 94.0, "evaluation/failed_tasks": 0.0, "evaluation/not_run_tasks": 6.0,
    }  # fmt: skip


def test_an_environment_that_never_says_what_is_right_has_a_return_and_no_accuracy():
    result = result_of([make_trajectory("t", reward=0.5)] * 4)
    assert (result.accuracy, result.return_mean) == (None, 0.5)
    assert result.sentence() == "return 0.500 (4 of 4 tasks answered)"


def test_an_evaluation_in_which_everything_fails_has_no_figure():
    result = result_of([RAISED] * 4)
    assert (result.accuracy, result.return_mean, result.missing) == (None, None, False)
    assert result.sentence() == "no result (0 of 4 tasks answered, 4 failed: KeyError: 'a' in t.py:3)"
