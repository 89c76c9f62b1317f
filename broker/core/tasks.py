"""The task queue, and the checks of what comes for its tasks. Pure.

The queue says which actor runs which task, until when, and what happens when a task is lost. Checks are of tasks,
segments and staleness; `SegmentFlow` has the credit of segments.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from operator import attrgetter
from typing import TypeVar

import msgspec

from broker.config import BrokerConfig
from broker.core.records import Ledger, TaskLease, TaskRecord
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
    if segment.policy not in ("", task.policy):
        return f"policy {segment.policy!r}, the task says {task.policy!r}"
    if segment.action_tokens and not segment.policy and segment.version_min < 0:
        return f"{segment.action_tokens} action tokens without a policy version"
    if segment.policy and segment.version_max >= 0:
        return f"policy version {segment.version_max} of tokens that {segment.policy!r} wrote"
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


class Recent:
    """The ``size`` keys that were added last, with a number each.

    Example:
        >>> recent = Recent(2)
        >>> for key in "abc": recent.add(key, 1)
        >>> recent.get("a") is None, recent.get("c")
        (True, 1)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: str) -> bool:
        return key in self._numbers

    def add(self, key: str, number: int) -> None:
        if key in self._numbers:
            self._numbers.move_to_end(key)
        self._numbers[key] = number
        if len(self._numbers) > self._size:
            self._numbers.popitem(last=False)

    def get(self, key: str) -> int | None:
        return self._numbers.get(key)

    def items(self) -> list[tuple[str, int]]:
        """Return keys and numbers, oldest first."""
        return list(self._numbers.items())


REMEMBERED_TASKS = 131_072
"""Number of tasks that are over whose ids are kept, to recognise PutTasks and segments that come twice."""
REJECTED_WAIT_S = 1.0
MAX_SKIPPED = 64
UNWANTED = -1

A = TypeVar("A")


class TaskQueue:
    """All tasks that are not over, and a bounded memory of those that are.

    Args:
        lease_s: seconds without progress after which a lease ends.
        max_attempts: number of losses after which a task is given up.
        max_queued: upper limit of the tasks that wait for an actor.
        boot: part of the lease ids; it must differ with each start of the broker.
    """

    def __init__(
        self, ledger: Ledger, *, lease_s: float, max_attempts: int, max_queued: int, boot: str = ""
    ) -> None:
        self._ledger, self._boot = ledger, boot
        self._lease_s, self._max_attempts, self._max_queued = lease_s, max_attempts, max_queued
        self._live: dict[str, TaskRecord] = {}
        self._queues: dict[str, OrderedDict[str, TaskRecord]] = {
            "eval": OrderedDict(),
            "train": OrderedDict(),
        }
        self._leases: dict[str, TaskRecord] = {}
        self._lease_count = 0
        self.over = Recent(REMEMBERED_TASKS)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def waiting(self) -> bool:
        """Whether any task is queued."""
        return any(self._queues.values())

    @property
    def leased(self) -> int:
        return len(self._leases)

    def get(self, task_id: str) -> TaskRecord | None:
        return self._live.get(task_id)

    def by_lease(self, lease_id: str) -> TaskRecord | None:
        return self._leases.get(lease_id)

    def held_by(self, actor: str) -> list[TaskRecord]:
        return [r for r in self._leases.values() if r.lease is not None and r.lease.actor == actor]

    def leases(self) -> Iterator[tuple[TaskRecord, TaskLease]]:
        for record in list(self._leases.values()):
            assert record.lease is not None
            yield record, record.lease

    def live(self) -> list[TaskRecord]:
        """Return all tasks that are not over: queued ones in their order, then leased ones."""
        queued = [record for queue in self._queues.values() for record in queue.values()]
        return queued + list(self._leases.values())

    def restore(self, records: Iterable[TaskRecord], over: Iterable[tuple[str, int]], now: float) -> None:
        """Restore what another process held. Leases are renewed, because the clock is a different one."""
        for task_id, attempt in over:
            self.over.add(task_id, attempt)
        for record in records:
            self._live[record.task.task_id] = record
            record.retry_at = 0.0
            if record.lease is None:
                self._queues[record.task.purpose][record.task.task_id] = record
            else:
                record.lease.renewed, record.lease.limit = now, now + record.task.deadline_s + self._lease_s
                self._leases[record.lease.lease_id] = record

    def groups(self) -> set[str]:
        """Return the groups that have a task that is not over."""
        return {record.task.group_id for record in self._live.values()}

    def unseen(self, tasks: list[Task]) -> list[Task]:
        """Return the tasks that were not seen before, each once."""
        fresh, live, over = dict[str, Task](), self._live, self.over
        for task in tasks:
            if task.task_id not in live and task.task_id not in over:
                fresh.setdefault(task.task_id, task)
        return list(fresh.values())

    def room(self) -> int:
        """Return how many more tasks may be queued."""
        return max(0, self._max_queued - self.queued)

    def put(self, task: Task) -> None:
        record = TaskRecord(task)
        self._live[task.task_id] = record
        self._queues[task.purpose][task.task_id] = record
        self._ledger.task("put")

    def next(
        self, choose: Callable[[TaskRecord, float], A | None], now: float
    ) -> tuple[TaskRecord, A] | None:
        """Return the first queued task for which ``choose`` names an actor, and the actor; evaluation first.

        After `MAX_SKIPPED` tasks without an actor the search ends.
        """
        skipped = 0
        for queue in self._queues.values():
            for record in queue.values():
                actor = choose(record, now)
                if actor is not None:
                    return record, actor
                skipped += 1
                if skipped > MAX_SKIPPED:
                    return None
        return None

    def new_lease_id(self) -> str:
        """Return a lease id that was never used before, not even by an earlier broker process."""
        self._lease_count += 1
        return f"t{self._boot}.{self._lease_count}"

    def lease(self, task_id: str, lease_id: str, actor: str, incarnation: int, now: float) -> TaskRecord:
        """Lease a queued task to an actor."""
        record = self._live[task_id]
        del self._queues[record.task.purpose][task_id]
        limit = now + record.task.deadline_s + self._lease_s
        record.lease = TaskLease(lease_id, actor, incarnation, now, limit)
        self._leases[lease_id] = record
        self._ledger.task("leased")
        return record

    def expired(self, progress_at: Callable[[str], float], now: float) -> list[tuple[TaskRecord, str]]:
        """Return the leases that have run out, each with the reason."""
        ended: list[tuple[TaskRecord, str]] = []
        for record, lease in self.leases():
            renewed = max(lease.renewed, progress_at(lease.actor))
            if now - renewed > self._lease_s:
                ended.append((record, f"no progress for {now - renewed:.1f} s"))
            elif now > lease.limit:
                ended.append((record, f"not done {self._lease_s:g} s after its deadline"))
        return ended

    def hold(self, actors: Set[str], seconds: float, now: float) -> None:
        """Extend the leases of actors that had to wait for the broker during the last ``seconds``."""
        for record in self._leases.values():
            if record.lease is not None and record.lease.actor in actors:
                record.lease.renewed = now
                record.lease.limit += seconds

    def end_lease(self, record: TaskRecord, now: float, *, fault: bool, avoid: str = "") -> bool:
        """End a lease and queue its task in front as a new attempt; return False if the task is given up.

        ``fault``: the loss counts towards ``max_attempts``. ``avoid``: the actor that rejected the task.
        """
        assert record.lease is not None
        del self._leases[record.lease.lease_id]
        record.lease = None
        record.losses += fault
        self._ledger.task("lost")
        if record.losses >= self._max_attempts:
            self.cancel(record)
            self._ledger.task("given_up")
            return False
        record.attempt += 1
        record.avoid, record.retry_at = avoid, now + REJECTED_WAIT_S if avoid else 0.0
        queue = self._queues[record.task.purpose]
        queue[record.task.task_id] = record
        queue.move_to_end(record.task.task_id, last=False)
        return True

    def close(self, record: TaskRecord) -> None:
        """End a task, because the trajectory of its attempt is whole."""
        self._remove(record, record.attempt)
        self._ledger.task("closed")

    def cancel(self, record: TaskRecord) -> None:
        """End a task of which no attempt counts."""
        self._remove(record, UNWANTED)

    def _remove(self, record: TaskRecord, final_attempt: int) -> None:
        task_id = record.task.task_id
        del self._live[task_id]
        if record.lease is not None:
            self._leases.pop(record.lease.lease_id, None)
        else:
            self._queues[record.task.purpose].pop(task_id, None)
        self.over.add(task_id, final_attempt)
