"""Checks of segments, tasks and staleness, and segment credit. Pure functions of headers and numbers."""

from collections.abc import Sequence
from operator import attrgetter

import msgspec

from broker.config import BrokerConfig
from protocol.arrays import ITEM_BYTES, TOKEN_ARRAYS
from protocol.codec import Buffer
from protocol.messages.episodes import Segment, Task
from protocol.messages.fields import MAX_ARRAYS

_name = attrgetter("name")
LEAST_SEGMENT_BYTES = 4_096
SHARERS = 4
MAX_TASK_BYTES = 240 * 1024
"""Upper limit of one task in MessagePack, so that a LeaseTask with the task fits into a message header."""


def why_invalid(segment: Segment, task: Task, offset: int, body: Buffer) -> str:
    """Return where a segment's header contradicts itself, its task or its place in the trajectory, or "".

    The check uses only the header and the *length* of the body, never the tokens.
    """
    if (segment.group_id, segment.group_size) != (task.group_id, task.group_size):
        said = f"group {segment.group_id!r} of {segment.group_size}"
        return f"{said}, the task says {task.group_id!r} of {task.group_size}"
    if segment.purpose != task.purpose:
        return f"purpose {segment.purpose!r}, the task says {task.purpose!r}"
    if segment.offset != offset:
        return f"offset {segment.offset}, the trajectory has {offset} tokens"
    if segment.action_tokens > segment.tokens:
        return f"{segment.action_tokens} action tokens among {segment.tokens} tokens"
    if segment.version_min > segment.version_max or segment.version_min < -1:
        return f"policy versions from {segment.version_min} to {segment.version_max}"
    if segment.action_tokens and segment.version_min < 0:
        return f"{segment.action_tokens} action tokens without a policy version"
    end, most = segment.offset + segment.tokens, task.sampling.max_trajectory_tokens
    if end > most:
        return f"{end} tokens of the trajectory, the task's max_trajectory_tokens is {most}"
    for turn in segment.turns:
        if not offset <= turn.start <= turn.end <= end:
            return f"turn {turn.index} at [{turn.start}, {turn.end}) outside [{offset}, {end})"
        if turn.back > max(turn.index, 1):
            return f"turn {turn.index} continues the one {turn.back} turns before it"
    return _why_arrays_invalid(segment, body)


def _why_arrays_invalid(segment: Segment, body: Buffer) -> str:
    if len(segment.arrays) > MAX_ARRAYS:
        return f"{len(segment.arrays)} arrays, at most {MAX_ARRAYS}"
    names, tokens, end = set(map(_name, segment.arrays)), segment.tokens, len(body)
    for spec in segment.arrays:
        if spec.length != tokens and spec.name in TOKEN_ARRAYS:
            return f"array {spec.name!r} has {spec.length} elements, the segment {tokens} tokens"
        if spec.offset + spec.length * ITEM_BYTES[spec.dtype] > end:
            return f"array {spec.name!r} ends behind the body of {end} bytes"
    if missing := TOKEN_ARRAYS.keys() - names:
        return f"array {min(missing)!r} is missing"
    return "two arrays of one name" if len(names) < len(segment.arrays) else ""


def why_tasks_invalid(tasks: Sequence[Task], frames: Sequence[Buffer]) -> str:
    """Return what is wrong with tasks before they are queued, or "".

    The broker sends a task on in a LeaseTask, whose header must have room for it.
    """
    if not frames or len(frames[0]) <= MAX_TASK_BYTES:
        return ""
    for task in tasks:
        if (size := len(msgspec.msgpack.encode(task))) > MAX_TASK_BYTES:
            return f"task {task.task_id!r} has {size} bytes, at most {MAX_TASK_BYTES}; none of the message was taken"
    return ""


def is_stale(version_max: int, current_version: int, max_policy_lag: int) -> bool:
    """Return whether even the freshest token is older than the bound. -1 (no action token) is never stale.

    Example:
        >>> [is_stale(newest, 10, 4) for newest in (5, 6, -1)]
        [True, False, False]
    """
    return 0 <= version_max < current_version - max_policy_lag


class SegmentFlow:
    """Segment credit of actors, so that what is held plus what may still come stays within the bounds.

    With ``trickle`` (the learner waits, no unit is ready, and unfinished groups take all room) an actor
    without credit gets a credit of one, above the bound. Otherwise those groups could never be finished.

    Example:
        >>> flow = SegmentFlow(BrokerConfig(max_queued_segments=8, segment_credit=100))
        >>> flow.join("a"); flow.grant("a", held=0, nbytes=0, trickle=False)
        2
        >>> flow.grant("a", held=6, nbytes=0, trickle=False), flow.outstanding
        (0, 2)
        >>> flow.used("a", 100), flow.used("a", 100), flow.grant("a", held=8, nbytes=0, trickle=True)
        (True, True, 1)
    """

    def __init__(self, config: BrokerConfig) -> None:
        self._max_segments, self._max_bytes = config.max_queued_segments, config.max_queued_bytes
        self._window = min(config.segment_credit, max(1, config.max_queued_segments // SHARERS))
        self._overdraft = config.segment_credit
        self._due_at = self._window - max(1, self._window // 4)
        """Credit up to which an actor gets more, so that not every single segment causes a grant."""
        self._credit: dict[str, int] = {}
        self._largest = LEAST_SEGMENT_BYTES
        self._short: dict[str, None] = {}
        """Actors that got less credit than was due, in the order in which that happened."""
        self.outstanding = 0
        """Credit that actors have received and not used yet."""

    def join(self, actor: str) -> None:
        """Let an actor start without credit. Its overdraft stays, or it could reset that with every Hello."""
        beyond = min(0, self._credit.get(actor, 0))
        self.leave(actor)
        self._credit[actor] = beyond

    def leave(self, actor: str) -> None:
        self.outstanding -= max(0, self._credit.pop(actor, 0))
        self._short.pop(actor, None)

    def credit(self, actor: str) -> int:
        return max(0, self._credit.get(actor, 0))

    def used(self, actor: str, nbytes: int) -> bool:
        """Count a segment of an actor; return False if its overdraft has reached `segment_credit`."""
        if nbytes > self._largest:
            self._largest = nbytes
        credit = self._credit[actor]
        if credit <= -self._overdraft:
            return False
        self.outstanding -= credit > 0
        self._credit[actor] = credit - 1
        return True

    def room(self, held: int, nbytes: int) -> int:
        """Return how many segments may still be granted, if each is as large as the largest seen so far."""
        by_bytes = (self._max_bytes - nbytes) // self._largest
        return min(self._max_segments - held, by_bytes) - self.outstanding

    def is_due(self, actor: str) -> bool:
        """Return whether the actor's credit is so low that more is due."""
        credit = self._credit.get(actor, 0)
        return credit <= 0 or credit <= self._due_at

    def take_short(self) -> list[str]:
        """Return the actors that got less credit than was due since the last call."""
        taken, self._short = list(self._short), {}
        return taken

    def grant(self, actor: str, *, held: int, nbytes: int, trickle: bool) -> int:
        """Return the credit to grant now, which is already noted; 0 if none is due."""
        if not self.is_due(actor):
            return 0
        credit = self.credit(actor)
        due = min(self._window - credit, self.room(held, nbytes))
        if due < self._window - credit:
            self._short[actor] = None
        if due < max(1, self._window // 4) and credit > 0:
            return 0
        if due <= 0 and trickle and credit == 0:
            due = 1
        if due <= 0:
            return 0
        self._credit[actor] = credit + due
        self.outstanding += due
        return due
