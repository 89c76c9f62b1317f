"""Checks of what environments return, and the end of a trajectory that follows from it. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actors.errors import ActorError, EnvironmentFailed
from actors.segments import Closing
from envs.base import StepResult, ToolSchema
from protocol.messages.episodes import Reward, Task
from protocol.messages.fields import MAX_ITEMS, MAX_NAME, TrajectoryStatus

MAX_INFO_BYTES = 32_768
MAX_ANSWER_CHARS = 2_000
"""Most characters of an answer or a target that the trajectory records."""
SHOWN_CHARS = 200
"""Most characters of the name of a place in an error."""
MAX_NESTING = 200
"""Most levels of lists and maps in the arguments of a call or the schema of a tool. What renders them calls itself for
each level, and Python ends that at some 450."""


def check_conversation(messages: Any, function: str) -> None:
    """Check that what ``function`` returned is a conversation which a chat template and a tokenizer can take.

    Raises:
        EnvironmentFailed: it is none; or a text has half of a surrogate pair, or the arguments of a call are nested
            deeper than `MAX_NESTING`. The error names the place.

    Example:
        >>> check_conversation([{"role": "tool", "content": "7", "name": "a\\ud83d"}], "step")
        Traceback (most recent call last):
        ...
        actors.errors.EnvironmentFailed: environment: step: character 2 of messages[0].name is '\\ud83d', half of a ...
    """
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise EnvironmentFailed(
            f"environment: {function} returned {messages!r:.200}; it must be a list of "
            '{"role": "user", "content": TEXT}'
        )
    for number, message in enumerate(messages):
        _check_text(message["content"], "a message", function)
        for key, value in message.items():
            if key != "content":
                _check_values(value, f"messages[{number}].{key}", function, 0)


def check_tools(tools: Sequence[ToolSchema], function: str) -> None:
    """Check that a chat template and a tokenizer can take the schemas of tools.

    Raises:
        EnvironmentFailed: see `check_conversation`.
    """
    for number, tool in enumerate(tools):
        _check_values(tool, f"tools[{number}]", function, 0)


def _check_values(value: Any, place: str, function: str, depth: int) -> None:
    """Check all texts in a value of JSON, and how deep it is nested."""
    if isinstance(value, str):
        _check_text(value, place, function)
        return
    if not isinstance(value, Mapping | list | tuple) or not value:
        return
    if depth >= MAX_NESTING:
        raise EnvironmentFailed(
            f"environment: {function}: {place} is nested deeper than {MAX_NESTING} levels, which no chat template takes"
        )
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_text(str(name), f"a name in {place}", function)
            _check_values(part, _shortened(f"{place}.{str(name)[:SHOWN_CHARS]}"), function, depth + 1)
        return
    for number, part in enumerate(value):
        _check_values(part, _shortened(f"{place}[{number}]"), function, depth + 1)


def _shortened(place: str) -> str:
    """Return the name of a place, bounded: it is made anew for each value, and a key may be as long as a request."""
    return place if len(place) <= SHOWN_CHARS else f"{place[: SHOWN_CHARS - 50]}..."


def _check_text(text: str, place: str, function: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailed(
            f"environment: {function}: character {error.start + 1} of {place} is {text[error.start]!r}, half of a "
            "surrogate pair, which no tokenizer takes"
        ) from None


def finite_rewards(result: StepResult) -> dict[str, float]:
    """Return the rewards of a step as floats.

    Raises:
        EnvironmentFailed: a reward is not a finite number, a name is too long, or there are too many rewards.

    Example:
        >>> finite_rewards(StepResult(rewards={"score": 1}))
        {'score': 1.0}
    """
    return _finite(result.rewards)


def earlier_rewards(result: StepResult, answers: Sequence[int]) -> list[Reward]:
    """Return the rewards that the last step of an episode gives to earlier turns.

    Args:
        answers: indices of the action turns, in order.

    Raises:
        EnvironmentFailed: see `finite_rewards`; or there is no such answer.

    Example:
        >>> earlier_rewards(StepResult(done=True, earlier={1: {"tidy": 1}}), [1, 3, 5])
        [Reward(name='tidy', turn=3, value=1.0)]
    """
    if sum(map(len, result.earlier.values())) + len(result.rewards) > MAX_ITEMS:
        raise EnvironmentFailed(f"environment: rewards of all turns at the end are at most {MAX_ITEMS}")
    found = []
    for number, rewards in sorted(result.earlier.items()):
        if not 0 <= number < len(answers):
            raise EnvironmentFailed(f"environment: a reward of answer {number} of {len(answers)}")
        found += [Reward(name, answers[number], value) for name, value in _finite(rewards).items()]
    return found


def _finite(given: Mapping[str, Any]) -> dict[str, float]:
    rewards: dict[str, float] = {}
    if len(given) > MAX_ITEMS or any(len(name) > MAX_NAME for name in given):
        raise EnvironmentFailed(
            f"environment: rewards are at most {MAX_ITEMS}, with names of at most {MAX_NAME} characters"
        )
    for name, value in given.items():
        try:
            rewards[name] = float(value)
        except (TypeError, ValueError):
            raise EnvironmentFailed(f"environment: reward {name!r} is {value!r}, not a number") from None
        if not math.isfinite(rewards[name]):
            raise EnvironmentFailed(f"environment: reward {name!r} is {value!r}, not a finite number")
    return rewards


def bounded(info: dict[str, Any]) -> dict[str, Any]:
    """Return ``info`` if it can be encoded and is small enough, else a note that says why it was left out."""
    try:
        size = len(msgspec.msgpack.encode(info))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return {"left_out": f"info cannot be encoded: {error}"[:200]}
    if size > MAX_INFO_BYTES:
        return {"left_out": f"info of {size} bytes, at most {MAX_INFO_BYTES}"}
    return info


def checked_hints(hints: Any) -> list[str]:
    """Return the hints of a step.

    Raises:
        EnvironmentFailed: they are not texts, or too long.

    Example:
        >>> checked_hints(["Begin with 17.", "17 + 25 = 42"])
        ['Begin with 17.', '17 + 25 = 42']
    """
    texts = list(hints) if isinstance(hints, Sequence) and not isinstance(hints, str) else [hints]
    if not all(isinstance(text, str) and text for text in texts):
        raise EnvironmentFailed(
            f"environment: hints are {hints!r:.200}; give texts, from the weakest to the strongest"
        )
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise EnvironmentFailed(
            "environment: a hint has half of a surrogate pair, which no tokenizer takes"
        ) from None
    if size > MAX_INFO_BYTES:
        raise EnvironmentFailed(f"environment: hints of {size} bytes, at most {MAX_INFO_BYTES}")
    return texts


def checked_marks(marks: Any) -> dict[str, str | float]:
    """Return the marks of a step, numbers as floats.

    Raises:
        EnvironmentFailed: a mark is neither text nor a finite number, or too long, or there are too many.

    Example:
        >>> checked_marks({"anchor": "kitchen", "calls": 2})
        {'anchor': 'kitchen', 'calls': 2.0}
    """
    if not isinstance(marks, Mapping) or len(marks) > MAX_ITEMS:
        raise EnvironmentFailed(f"environment: marks are {marks!r:.200}; give at most {MAX_ITEMS}, by name")
    checked: dict[str, str | float] = {}
    for name, value in marks.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise EnvironmentFailed(
                f"environment: name of a mark is {name!r:.200}; it has 1 to {MAX_NAME} characters"
            )
        if isinstance(value, str):
            if len(value) > MAX_NAME:
                raise EnvironmentFailed(
                    f"environment: mark {name!r} has {len(value)} characters, at most {MAX_NAME}; give a hash of it"
                )
            checked[name] = value
        elif isinstance(value, int | float) and math.isfinite(value):
            checked[name] = float(value)
        else:
            raise EnvironmentFailed(
                f"environment: mark {name!r} is {value!r:.200}, neither text nor a finite number"
            )
    return checked


def checked_limit(limit: Any) -> int:
    """Return the most tokens of an answer that an environment asks for.

    Raises:
        EnvironmentFailed: it is no whole number of at least 1.

    Example:
        >>> checked_limit(64)
        64
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise EnvironmentFailed(
            f"environment: turn_limit returned {limit!r:.200}; it has to be a whole number of at least 1, or None"
        )
    return limit


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
    extra |= {
        name: text[:MAX_ANSWER_CHARS]
        for name, text in (("answer", result.answer), ("target", result.target))
        if isinstance(text, str)
    }
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
