"""What an actor owes the broker: unacknowledged segments and task credit. Pure: no socket, no clock."""

from collections import Counter, OrderedDict, deque

from protocol.arrays import SegmentArrays
from protocol.codec import Frames, encode_arrays
from protocol.messages import LeaseTask, SegmentAck, TaskCredit
from protocol.names import SegmentKey

REMEMBERED_LEASES = 1_024


class Outbox:
    """Segments on their way: sent as far as the broker's credit reaches, kept until acknowledged.

    After a (re)join the broker's view starts anew: it grants segment credit again, and every segment without
    an acknowledgement is sent again, in order. The broker drops those it has.

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
        """Segments for which there is no credit."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether everything that was offered has been acknowledged."""
        return not self._waiting and not self._unacked

    def offer(self, cut: SegmentArrays) -> None:
        """Take a segment over."""
        segment, arrays = cut
        self.offer_frames((segment.trajectory_id, segment.index), encode_arrays(segment, arrays))

    def offer_frames(self, key: SegmentKey, frames: Frames) -> None:
        self._waiting[key] = frames

    def due(self) -> list[Frames]:
        """What may be sent now; it counts as sent."""
        sent: list[Frames] = []
        while self._credit > 0 and self._waiting:
            key, frames = self._waiting.popitem(last=False)
            self._unacked[key] = frames
            self._credit -= 1
            sent.append(frames)
        return sent

    def granted(self, segments: int) -> None:
        """The broker takes ``segments`` more."""
        self._credit += segments

    def acked(self, ack: SegmentAck) -> None:
        """Forget an acknowledged segment, whatever the broker did with it."""
        self.acks[ack.status] += 1
        key = (ack.trajectory_id, ack.index)
        self._unacked.pop(key, None)
        self._waiting.pop(key, None)  # acknowledged before a rejoin, heard after it

    def rejoined(self) -> None:
        """The connection is new: credit is void, and what is not acknowledged waits again, in order."""
        self._credit = 0
        self.resent += len(self._unacked)
        self._unacked.update(self._waiting)
        self._waiting, self._unacked = self._unacked, OrderedDict()

    def holds(self, trajectory_id: str) -> bool:
        """Whether a segment of a trajectory is not acknowledged yet."""
        return any(key[0] == trajectory_id for kept in (self._waiting, self._unacked) for key in kept)

    def forget(self, trajectory_id: str) -> None:
        """Drop what is left of a trajectory that nobody wants any more."""
        for kept in (self._waiting, self._unacked):
            for key in [key for key in kept if key[0] == trajectory_id]:
                del kept[key]


class LeaseBook:
    """Leases that are being run, and how many more the broker may send.

    ``capacity`` is what the actor can run at a time. At each (re)join the broker counts from zero, so the
    credit sent then is capacity minus what runs; afterwards each ended lease gives one back.

    Example:
        >>> book = LeaseBook(capacity=2)
        >>> book.joined()
        TaskCredit(tasks=2)
        >>> book.ended("unknown") is None
        True
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: dict[str, str] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED_LEASES)
        self.draining = False

    def __len__(self) -> int:
        return len(self._running)

    def joined(self) -> TaskCredit | None:
        """Credit to announce after a Welcome."""
        free = self._capacity - len(self._running)
        return TaskCredit(tasks=free) if free > 0 and not self.draining else None

    def why_not(self) -> str:
        """Reason to reject any lease now: "draining", "full" (more came than there was credit), or ""."""
        if self.draining:
            return "draining"
        return "full" if len(self._running) >= self._capacity else ""

    def leased(self, lease: LeaseTask) -> bool:
        """Note a lease; False if it is not to be started: it runs already, or there is a reason not to."""
        if self.why_not() or self.knows(lease.lease_id):
            return False
        self._running[lease.lease_id] = lease.trajectory_id
        return True

    def knows(self, lease_id: str) -> bool:
        """Whether it is being run, or was: the end of it may be on its way."""
        return lease_id in self._running or lease_id in self._over

    def is_over(self, lease_id: str) -> bool:
        """Whether it was run, and has ended here."""
        return lease_id in self._over

    def lease_of(self, trajectory_id: str) -> str | None:
        """Lease under which a trajectory is being run."""
        return next((lease for lease, running in self._running.items() if running == trajectory_id), None)

    def ended(self, lease_id: str) -> TaskCredit | None:
        """Note the end of a lease, and give its credit back."""
        if self._running.pop(lease_id, None) is None:
            return None
        self._over.append(lease_id)
        return self.unused()

    def unused(self) -> TaskCredit | None:
        """Credit for a lease that has come to nothing."""
        return None if self.draining else TaskCredit(tasks=1)
