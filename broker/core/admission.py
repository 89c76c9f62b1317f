"""What is let in, and what is too old to be handed on. Pure functions of headers and numbers."""

from collections.abc import Sequence
from operator import attrgetter

import msgspec

from broker.config import BrokerConfig
from protocol.arrays import ITEM_BYTES, TOKEN_ARRAYS
from protocol.codec import Buffer
from protocol.messages import MAX_ARRAYS, Segment, Task

_name = attrgetter("name")
LEAST_SEGMENT_BYTES = 4_096
SHARERS = 4
MAX_TASK_BYTES = 240 * 1024
"""Of one task, as MessagePack: a LeaseTask with it is still a message."""


def why_invalid(segment: Segment, task: Task, offset: int, body: Buffer) -> str:
    """What contradicts itself in a segment's header, or the task or its place; "" if nothing does.

    Only the header and the *length* of the body are looked at, never the tokens.
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
    return _why_arrays_invalid(segment, body)


def _why_arrays_invalid(segment: Segment, body: Buffer) -> str:
    if len(segment.arrays) > MAX_ARRAYS:
        return f"{len(segment.arrays)} arrays, at most {MAX_ARRAYS}"
    names, tokens, end = set(map(_name, segment.arrays)), segment.tokens, len(body)
    for spec in segment.arrays:
        if spec.length != tokens:
            return f"array {spec.name!r} has {spec.length} elements, the segment {tokens} tokens"
        if spec.offset + tokens * ITEM_BYTES[spec.dtype] > end:
            return f"array {spec.name!r} ends behind the body of {end} bytes"
    if missing := TOKEN_ARRAYS.keys() - names:
        return f"array {min(missing)!r} is missing"
    return "two arrays of one name" if len(names) < len(segment.arrays) else ""


def why_tasks_invalid(tasks: Sequence[Task], frames: Sequence[Buffer]) -> str:
    """What is wrong with tasks before they are queued; "" if nothing is.

    A task travels on in a LeaseTask, whose header has to hold it.
    """
    if not frames or len(frames[0]) <= MAX_TASK_BYTES:
        return ""
    for task in tasks:
        if (size := len(msgspec.msgpack.encode(task))) > MAX_TASK_BYTES:
            return f"task {task.task_id!r} has {size} bytes, at most {MAX_TASK_BYTES}; none of the message was taken"
    return ""


def is_stale(version_max: int, current_version: int, max_policy_lag: int) -> bool:
    """Whether even the freshest token is older than the bound; -1 (no action token) never is.

    Example:
        >>> [is_stale(newest, 10, 4) for newest in (5, 6, -1)]
        [True, False, False]
    """
    return 0 <= version_max < current_version - max_policy_lag


class SegmentFlow:
    """Credit of actors for segments, so that what is held plus what may still come stays within the bounds.

    With ``trickle`` (the learner waits, nothing is ready, all room is taken by unfinished groups) an actor
    without credit gets a single one, over the bound: otherwise those groups could never be finished.

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
        """An actor with so much credit or less is given more: not for every single segment."""
        self._credit: dict[str, int] = {}
        self._largest = LEAST_SEGMENT_BYTES
        self._short: dict[str, None] = {}
        """Actors that got less than was due, in the order of that."""
        self.outstanding = 0
        """Credit that actors have and have not used."""

    def join(self, actor: str) -> None:
        """The actor starts without credit; what it sent beyond it before is not forgotten, or it could go on so."""
        beyond = min(0, self._credit.get(actor, 0))
        self.leave(actor)
        self._credit[actor] = beyond

    def leave(self, actor: str) -> None:
        self.outstanding -= max(0, self._credit.pop(actor, 0))
        self._short.pop(actor, None)

    def credit(self, actor: str) -> int:
        return max(0, self._credit.get(actor, 0))

    def used(self, actor: str, nbytes: int) -> bool:
        """The actor has sent a segment; False if it is over its credit by more than a window."""
        if nbytes > self._largest:
            self._largest = nbytes
        credit = self._credit[actor]
        if credit <= -self._overdraft:
            return False
        self.outstanding -= credit > 0
        self._credit[actor] = credit - 1
        return True

    def room(self, held: int, nbytes: int) -> int:
        """Segments that may still be granted, by number and by bytes (each as large as the largest seen)."""
        by_bytes = (self._max_bytes - nbytes) // self._largest
        return min(self._max_segments - held, by_bytes) - self.outstanding

    def is_due(self, actor: str) -> bool:
        """Whether there is reason to grant."""
        credit = self._credit.get(actor, 0)
        return credit <= 0 or credit <= self._due_at

    def take_short(self) -> list[str]:
        """Actors that got less than was due since the last call."""
        taken, self._short = list(self._short), {}
        return taken

    def grant(self, actor: str, *, held: int, nbytes: int, trickle: bool) -> int:
        """Credit to grant now (already noted), 0 if none is due."""
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
