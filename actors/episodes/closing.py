"""How a trajectory ends: what its last segment says. Pure."""

from collections.abc import Sequence
from typing import Any

from actors.environments.results import bounded, checked_hints
from actors.errors import ActorError
from actors.segments import Closing
from envs.base import StepResult
from protocol.messages.fields import TrajectoryStatus
from protocol.messages.tasks import Task


def closing_of(
    status: TrajectoryStatus, why: str, result: StepResult, task: Task, answers: Sequence[int]
) -> Closing:
    """Return the end of a trajectory.

    Args:
        why: reason why its last turn, or the trajectory, ended.
        result: what the environment said last.
        answers: indices of the action turns, in order.

    Example:
        >>> result = StepResult(done=True, correct=True, auxiliary=[1])
        >>> task = Task(task_id="t", env="e", group_id="g", group_size=1)
        >>> closing_of("finished", "stop", result, task, [1, 3]).auxiliary
        (3,)
    """
    extra: dict[str, Any] = {"correct": result.correct, "info": bounded(result.info)}
    if result.hints and task.purpose == "train":
        extra["hints"] = checked_hints(result.hints)
    auxiliary = tuple(
        answers[number] for number in sorted(set(result.auxiliary)) if 0 <= number < len(answers)
    )
    return Closing(status, why, extra=extra, auxiliary=auxiliary)


def no_room(tokens: int, bound: str, longest: int) -> ActorError:
    """Return the error of a first prompt behind which no answer fits.

    Args:
        tokens: length of the prompt.
        bound: setting that bounds it.
        longest: value of the setting.
    """
    return ActorError(f"first prompt of {tokens} tokens leaves no room for an answer; {bound} is {longest}")
