"""An actor's state towards the broker: unacknowledged segments and task credit. Pure: no socket, no clock."""

from collections import Counter, OrderedDict, deque

from protocol.arrays import SegmentArrays
from protocol.codec import Frames, encode_arrays
from protocol.messages import LeaseTask, SegmentAck, TaskCredit
from protocol.names import SegmentKey

REMEMBERED_LEASES = 1_024


class Outbox:
    """Segments on their way to the broker: sent as far as its credit reaches, kept until acknowledged.

    After a (re)join the broker grants segment credit anew, and the outbox sends every unacknowledged segment
    again, in order. The broker drops the copies of segments that it has already.

    Example:
        >>> outbox = Outbox()
        >>> outbox.granted(1)
        >>> outbox.offer_frames(("t.0", 0), [b"a"]); outbox.offer_frames(("t.0", 1), [b"b"])
        >>> outbox.due(), outbox.waiting
        ([[b'a']], 1)
        >>> outbox.rejoined(); outbox.granted(8)
        >>> outbox.due()
        [[b'a'], [b'b']]
    """

    def __init__(self) -> None:
        self._credit = 0
        self._waiting: OrderedDict[SegmentKey, Frames] = OrderedDict()
        self._unacked: OrderedDict[SegmentKey, Frames] = OrderedDict()
        self.acks: Counter[str] = Counter()
        self.resent = 0

    @property
    def waiting(self) -> int:
        """Number of segments that wait to be sent, because there is no credit for them."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether everything that was offered has been acknowledged."""
        return not self._waiting and not self._unacked

    def offer(self, cut: SegmentArrays) -> None:
        """Encode a segment and queue it for sending."""
        segment, arrays = cut
        self.offer_frames((segment.trajectory_id, segment.index), encode_arrays(segment, arrays))

    def offer_frames(self, key: SegmentKey, frames: Frames) -> None:
        self._waiting[key] = frames

    def due(self) -> list[Frames]:
        """Return the frames of the segments that may be sent now, and count them as sent."""
        sent: list[Frames] = []
        while self._credit > 0 and self._waiting:
            key, frames = self._waiting.popitem(last=False)
            self._unacked[key] = frames
            self._credit -= 1
            sent.append(frames)
        return sent

    def granted(self, segments: int) -> None:
        """Add the broker's credit for ``segments`` more segments."""
        self._credit += segments

    def acked(self, ack: SegmentAck) -> None:
        """Drop an acknowledged segment, whatever status the broker gave it."""
        self.acks[ack.status] += 1
        key = (ack.trajectory_id, ack.index)
        self._unacked.pop(key, None)
        # A rejoin moves unacknowledged segments here, and an ack sent before it may arrive after it.
        self._waiting.pop(key, None)

    def rejoined(self) -> None:
        """Start anew on a new connection: no credit, and all unacknowledged segments wait, in order."""
        self._credit = 0
        self.resent += len(self._unacked)
        self._unacked.update(self._waiting)
        self._waiting, self._unacked = self._unacked, OrderedDict()

    def holds(self, trajectory_id: str) -> bool:
        """Return whether a segment of the trajectory is not acknowledged yet."""
        return any(key[0] == trajectory_id for kept in (self._waiting, self._unacked) for key in kept)

    def forget(self, trajectory_id: str) -> None:
        """Drop the remaining segments of a trajectory that is no longer wanted."""
        for kept in (self._waiting, self._unacked):
            for key in [key for key in kept if key[0] == trajectory_id]:
                del kept[key]


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
