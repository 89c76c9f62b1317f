"""Puts tasks into messages, within the bounds of a header and of what the broker's version understands. Pure."""

from collections.abc import Sequence

from learner.errors import BrokerRefused
from protocol.codec import MAJOR, MAX_HEADER_BYTES
from protocol.messages.tasks import PutTasks, Task

TASKS_PER_MESSAGE = 512
TASK_BYTES = 2_048
"""Bytes that are reckoned for a task in a message, without its note."""
TURN_BYTES = 32
"""Most bytes of a turn in a message."""
MINOR_OF_TASK_PARTS = 3
"""Minor version of the protocol since which tasks have notes, prefixes and bounds of branches."""


def messages_of(tasks: Sequence[Task]) -> list[PutTasks]:
    """Return messages with these tasks, each within the bounds of a header.

    Example:
        >>> tasks = [Task(task_id=f"g.{i}", env="e", group_id="g", group_size=20, note="x" * 16_000) for i in range(20)]
        >>> [len(message.tasks) for message in messages_of(tasks)]
        [14, 6]
    """
    messages: list[list[Task]] = []
    room = 0
    for task in tasks:
        size = TASK_BYTES + len(task.note.encode()) + _start_bytes(task)
        if not messages or size > room or len(messages[-1]) == TASKS_PER_MESSAGE:
            messages.append([])
            room = MAX_HEADER_BYTES
        messages[-1].append(task)
        room -= size
    return [PutTasks(tasks=each) for each in messages]


def refuse_older_broker(minor: int, broker: str) -> None:
    """Refuse a broker of an earlier version, which would lose a part of a task: see `is_newer`.

    Args:
        minor: minor version of the protocol that the broker speaks.
        broker: words that name the broker.

    Raises:
        BrokerRefused: the version is too early.
    """
    if minor < MINOR_OF_TASK_PARTS:
        raise BrokerRefused(
            f"{broker} speaks protocol {MAJOR}.{minor}, which has no notes and prefixes of tasks "
            "and no bound of branches; [learner.family] and learner.sampling.max_context_tokens need "
            f"{MAJOR}.{MINOR_OF_TASK_PARTS}: start a broker of this version, or take them out"
        )


def is_newer(task: Task) -> bool:
    """Return whether a task has a part that a broker before protocol 4.3 would lose."""
    return bool(task.note) or task.start is not None or task.sampling.max_context_tokens > 0


def _start_bytes(task: Task) -> int:
    return 0 if task.start is None else len(task.start.token_ids) + TURN_BYTES * len(task.start.turns)
