"""The task queue: which actor runs which task, until when, and what happens when a task is lost. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TypeVar

from broker.core.ledger import Ledger
from broker.core.records import TaskLease, TaskRecord
from protocol.messages.episodes import Task


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
