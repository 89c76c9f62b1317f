"""An actor's leases, and the task credit that follows from them. Pure: no socket, no clock."""

from collections import deque

from protocol.messages.tasks import LeaseTask, TaskCredit

REMEMBERED_LEASES = 1_024


class LeaseBook:
    """Leases that run, and the task credit that the actor announces to the broker.

    ``capacity`` is the number of episodes that the actor runs at the same time. At each (re)join the broker
    counts credit from zero, so the actor announces capacity minus the running leases. Afterwards each lease
    that ends frees one more. While no generator lets the actor in, the actor has no credit.

    Example:
        >>> book = LeaseBook(capacity=2)
        >>> book.joined() is None
        True
        >>> book.served(by_any=True)
        TaskCredit(tasks=2, void=True)
        >>> book.ended("unknown") is None
        True
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: dict[str, str] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED_LEASES)
        self.draining = False
        self._served = False

    def __len__(self) -> int:
        return len(self._running)

    def joined(self) -> TaskCredit | None:
        """Return the credit to announce after a Welcome, if there is any."""
        return TaskCredit(tasks=self._free) if self._free > 0 and self._takes_tasks else None

    def served(self, *, by_any: bool) -> TaskCredit | None:
        """Note whether any generator serves this actor. Return the credit to announce if that has changed."""
        if by_any == self._served:
            return None
        self._served = by_any
        return None if self.draining else TaskCredit(tasks=self._free if by_any else 0, void=True)

    @property
    def _free(self) -> int:
        return max(0, self._capacity - len(self._running))

    @property
    def _takes_tasks(self) -> bool:
        return self._served and not self.draining

    def why_not(self) -> str:
        """Return why any lease is rejected now: "draining", "full" (more leases than credit), or ""."""
        if self.draining:
            return "draining"
        return "" if self._free and self._takes_tasks else "full"

    def leased(self, lease: LeaseTask) -> bool:
        """Record a lease. Return False if it must not start: it is known, or `why_not` gives a reason."""
        if self.why_not() or self.knows(lease.lease_id):
            return False
        self._running[lease.lease_id] = lease.trajectory_id
        return True

    def knows(self, lease_id: str) -> bool:
        """Return whether a lease runs, or has run: the message of its end may be on its way."""
        return lease_id in self._running or lease_id in self._over

    def is_over(self, lease_id: str) -> bool:
        """Return whether a lease has run and ended here."""
        return lease_id in self._over

    def lease_of(self, trajectory_id: str) -> str | None:
        """Return the lease under which a trajectory runs, if it does."""
        return next((lease for lease, running in self._running.items() if running == trajectory_id), None)

    def ended(self, lease_id: str) -> TaskCredit | None:
        """Record the end of a lease. Return the credit that it frees, if any."""
        if self._running.pop(lease_id, None) is None:
            return None
        self._over.append(lease_id)
        return self.unused()

    def unused(self) -> TaskCredit | None:
        """Return credit for one more lease, or None while draining or without a generator."""
        return TaskCredit(tasks=1) if self._takes_tasks else None
