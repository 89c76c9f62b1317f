"""An actor's segments that the broker has not acknowledged. Pure: no socket, no clock."""

from collections import Counter, OrderedDict

from protocol.arrays import SegmentArrays
from protocol.codec import Frames, encode_arrays
from protocol.messages.segments import SegmentAck
from protocol.names import SegmentKey


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
