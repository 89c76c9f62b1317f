"""How an episode begins that the learner asked for because of an earlier one: with a note, or from a prefix. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from actors.errors import ActorError, PrefixDiverged
from envs.base import ChatMessage
from protocol.messages.tasks import Task, TaskStart


class RepeatedTurn(NamedTuple):
    """One turn of a prefix."""

    token_ids: list[int]
    action: bool
    """Whether the policy sampled it in the trajectory that the prefix was cut from."""


def with_note(messages: Sequence[ChatMessage], note: str) -> list[ChatMessage]:
    """Return the first messages of an episode with a note behind the text of the last one, after an empty line.

    Args:
        messages: what the environment's ``reset`` returned.
        note: `Task.note`; "" leaves the messages as they are.

    Raises:
        ActorError: there is a note, and the last message is the assistant's, or there is no message.

    Example:
        >>> with_note([{"role": "user", "content": "What is 17 + 25?"}], "Begin with 7 + 5.")
        [{'role': 'user', 'content': 'What is 17 + 25?\\n\\nBegin with 7 + 5.'}]
    """
    if not note:
        return list(messages)
    if not messages or messages[-1]["role"] == "assistant":
        raise ActorError(
            "the task has a note, but the first prompt does not end with a message that it can follow"
        )
    last = cast(ChatMessage, {**messages[-1], "content": f"{messages[-1]['content']}\n\n{note}"})
    return [*messages[:-1], last]


def repeated_turns(start: TaskStart) -> list[RepeatedTurn]:
    """Return the turns of a prefix: a prompt, then actions and observations in turns, an observation last.

    Raises:
        ActorError: the prefix has a different form.

    Example:
        >>> from protocol.messages.segments import Turn
        >>> turns = [Turn(0, 0, 1, False), Turn(1, 1, 2, True), Turn(2, 2, 3, False)]
        >>> ids = np.array([5, 6, 7], "<i4").tobytes()
        >>> [turn.token_ids for turn in repeated_turns(TaskStart(token_ids=ids, turns=turns, parent="1g17.0.0"))]
        [[5], [6], [7]]
    """
    if len(start.token_ids) % 4:
        raise ActorError(
            f"the prefix of {start.parent} has {len(start.token_ids)} bytes, which are no token ids"
        )
    token_ids = np.frombuffer(start.token_ids, "<i4").tolist()
    at = 0
    for number, turn in enumerate(start.turns):
        if (
            (turn.index, turn.start, turn.action) != (number, at, bool(number % 2))
            or turn.end <= at
            or turn.back != 1
        ):
            raise ActorError(
                f"the prefix of {start.parent} has no plain conversation: turn {number} is {turn}"
            )
        at = turn.end
    if at != len(token_ids) or len(start.turns) % 2 == 0:
        raise ActorError(
            f"the prefix of {start.parent} has {len(start.turns)} turns and {len(token_ids)} tokens; it must end with "
            "an observation"
        )
    return [RepeatedTurn(token_ids[turn.start : turn.end], turn.action) for turn in start.turns]


def check_room(task: Task, *, prompt: int, most_turns: int) -> None:
    """Check that an episode may go on behind the prefix of its task.

    Args:
        task: a task with a prefix.
        prompt: tokens of the first prompt, which is longer than the prefix's if the task has a note, too.
        most_turns: most actions of an episode.

    Raises:
        ActorError: the prefix has as many tokens or actions as an episode may have.
    """
    assert task.start is not None, "the caller has looked"
    bound = "max_context_tokens" if task.sampling.max_context_tokens else "max_trajectory_tokens"
    limit = task.sampling.max_context_tokens or task.sampling.max_trajectory_tokens
    tokens = prompt + len(task.start.token_ids) // 4 - task.start.turns[0].end
    if tokens >= limit:
        raise ActorError(f"prefix of {tokens} tokens leaves no room for an answer; {bound} is {limit}")
    if (actions := len(task.start.turns) // 2) >= most_turns:
        raise ActorError(
            f"prefix of {actions} actions leaves none to this episode; actor.max_turns is {most_turns}"
        )


def check_repeated(number: int, expected: Sequence[int], found: Sequence[int]) -> None:
    """Compare an observation with that of the prefix, token by token.

    Raises:
        PrefixDiverged: they differ; the text names the turn and the first token.

    Example:
        >>> check_repeated(2, [5, 6, 7], [5, 9, 7])
        Traceback (most recent call last):
        ...
        actors.errors.PrefixDiverged: prefix diverged at turn 2: token 1 of its observation is 9, it was 6; ...
    """
    if list(expected) == list(found):
        return
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:
        what = f"its observation has {len(found)} tokens, it had {len(expected)}"
    else:
        what = f"token {at} of its observation is {found[at]}, it was {expected[at]}"
    raise PrefixDiverged(
        f"prefix diverged at turn {number}: {what}; the environment must answer the same actions of a task alike"
    )
