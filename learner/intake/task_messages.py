"""Puts tasks into messages, within the bounds of a header and of what the broker's version understands. Pure."""

from collections.abc import Sequence

from learner.errors import BrokerRefused
from protocol.codec import MAJOR, MAX_HEADER_BYTES
from protocol.messages.episodes import PutTasks, Task

TASKS_PER_MESSAGE = 512
TASK_BYTES = 2_048
"""Bytes that are reckoned for a task in a message, without its note."""
TURN_BYTES = 32
"""Most bytes of a turn in a message."""
MINOR_OF_TASK_PARTS = 3
"""Minor version of the protocol since which tasks have notes, prefixes and bounds of branches."""
MINOR_OF_ROUTES = 4
"""Minor version since which a task may ask for the experts of its tokens."""


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


def refuse_older_broker(tasks: Sequence[Task], minor: int, broker: str) -> None:
    """Refuse a broker of an earlier version, which would lose a part of these tasks.

    Args:
        minor: minor version of the protocol that the broker speaks.
        broker: words that name the broker.

    Raises:
        BrokerRefused: the version is too early.
    """
    needed = max(map(minor_of, tasks), default=0)
    if minor >= needed:
        return
    lost, setting = (
        ("cannot ask for experts", 'learner.algorithm.routes = "behaviour"')
        if needed == MINOR_OF_ROUTES
        else (
            "has no notes and prefixes of tasks and no bound of branches",
            "[learner.family] and learner.sampling.max_context_tokens",
        )
    )
    raise BrokerRefused(
        f"{broker} speaks protocol {MAJOR}.{minor}, which {lost}; {setting} need {MAJOR}.{needed}: start a broker of "
        "this version, or take them out"
    )


def minor_of(task: Task) -> int:
    """Return the minor version of the protocol since which a broker loses no part of a task; 0: any."""
    if task.sampling.routes:
        return MINOR_OF_ROUTES
    parts = bool(task.note) or task.start is not None or task.sampling.max_context_tokens > 0
    return MINOR_OF_TASK_PARTS if parts else 0


def _start_bytes(task: Task) -> int:
    return 0 if task.start is None else len(task.start.token_ids) + TURN_BYTES * len(task.start.turns)
