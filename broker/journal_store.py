"""Store that keeps segments and events in the journal, and the places of segments in memory."""

from collections import Counter, OrderedDict

from broker.core.events import AnyEvent, encode_event
from broker.core.store import Counted
from broker.journal.journal import Journal
from broker.journal.records import Kind, Place, pack_segment, unpack_segment
from protocol.codec import Buffer
from protocol.names import SegmentKey

MAX_COMMITTED_SHARE = 0.5
"""Share of the journal's `max_bytes` that committed segments may take before the store is crowded.

The rest is for segments that wait for the learner.
"""
RECENT_BYTES = 64 << 20
"""Bytes of the latest segments that are kept in memory."""


class JournalStore(Counted):
    """Segments in the journal. Memory holds their places, and the bytes of the latest ones.

    The broker delivers most segments while memory still has them, so it need not read them from the disk.
    """

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        super().__init__()
        self.journal, self._max_bytes = journal, max_bytes
        self._places: dict[SegmentKey, Place] = {}
        self._files: Counter[int] = Counter()
        self.freed = 0
        """How many times a file came to hold no needed segment."""
        self._recent: OrderedDict[SegmentKey, tuple[bytes, Buffer]] = OrderedDict()
        self._recent_nbytes = 0

    @property
    def low(self) -> bool:
        return self.journal.low or bool(self.journal.blocked)

    @property
    def crowded(self) -> bool:
        return self.low or self.committed_nbytes > MAX_COMMITTED_SHARE * self._max_bytes

    @property
    def files(self) -> set[int]:
        """Numbers of the journal files that hold a needed segment."""
        return set(self._files)

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None:
        nbytes = len(header) + len(body)
        place = self.journal.append(Kind.SEGMENT, *pack_segment(header, body))
        self.adopt(key, place, nbytes)
        self._recent[key] = header, body
        self._recent_nbytes += nbytes
        while self._recent_nbytes > RECENT_BYTES:
            self._remove(next(iter(self._recent)))

    def _remove(self, key: SegmentKey) -> None:
        frames = self._recent.pop(key, None)
        if frames is not None:
            self._recent_nbytes -= sum(map(len, frames))

    def adopt(self, key: SegmentKey, place: Place, nbytes: int) -> None:
        """Add a segment that the journal has already."""
        self.add(key, nbytes)
        self._places[key] = place
        self._files[place.file] += 1

    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]:
        frames = self._recent.get(key)
        return frames if frames is not None else unpack_segment(self.journal.read(self._places[key]))

    def commit(self, key: SegmentKey) -> None:
        super().commit(key)
        self._remove(key)

    def drop(self, key: SegmentKey) -> None:
        super().drop(key)
        self._remove(key)
        file = self._places.pop(key).file
        self._files[file] -= 1
        if not self._files[file]:
            del self._files[file]
            self.freed += 1

    def record_event(self, event: AnyEvent) -> None:
        self.journal.append(Kind.EVENT, encode_event(event))

    def index(self) -> list[tuple[SegmentKey, Place, int, bool]]:
        """Return key, place, bytes and whether committed, for every segment."""
        held = [(key, self._places[key], nbytes, False) for key, nbytes in self._held.items()]
        return held + [(key, self._places[key], nbytes, True) for key, nbytes in self._committed.items()]
