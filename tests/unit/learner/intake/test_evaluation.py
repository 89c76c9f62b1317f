"""Test what an evaluation says when tasks fail, are never run, or have no right answer."""

from learner.intake.evaluation import result_of
from protocol.messages import Failure
from tests.trajectories import make_trajectory

SOLVED = make_trajectory("t", correct=True, reward=1.0)
WRONG = make_trajectory("t", correct=False, reward=0.5)
RAISED = make_trajectory(
    "t", status="failed", failure=Failure(kind="KeyError", message="'a'", place="t.py:3")
)
LOST = make_trajectory("t", status="failed", failure=Failure(message="no generator", fault=False))


def test_the_means_are_over_the_answered_tasks():
    result = result_of([SOLVED, SOLVED, SOLVED, WRONG, RAISED, RAISED])
    assert (result.accuracy, result.return_mean) == (0.75, 0.875)
    assert (result.tasks, result.answered, result.failed, result.not_run) == (6, 4, 2, 0)
    assert result.sentence() == (
        "accuracy 0.750, return 0.875 (4 of 6 tasks answered, 2 failed: KeyError: 'a' in t.py:3)"
    )


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
