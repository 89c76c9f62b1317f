"""Books that outlive the process: a store that writes to the journal, snapshots, and the way back from both."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import fields

import msgspec
from msgspec import Struct

from broker.books import Books
from broker.errors import BooksBroken, BrokerError
from broker.events import AnyEvent, Published, decode_event, encode_event
from broker.journal import Journal, JournalError, Kind, Place, Record, pack_segment, unpack_segment
from broker.journal_records import decoded
from broker.ledger import Ledger
from broker.records import Group, TaskRecord, Trajectory, Unit
from broker.store import Counted, SegmentKey
from protocol.codec import Buffer, decode_segment
from protocol.errors import ProtocolError
from protocol.messages import DeliveryUnit, Hello

log = logging.getLogger(__name__)

MAX_ASIDE_SHARE = 0.5
"""Of the journal's bytes, for what is committed and in no checkpoint yet; the rest is for what waits."""


RECENT_BYTES = 64 << 20


class JournalStore(Counted):
    """Segments in the journal; in memory where they stand, and the latest of them too.

    Most are delivered before they are pushed out of there, and so need not be read.
    """

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        super().__init__()
        self.journal, self._max_bytes = journal, max_bytes
        self._places: dict[SegmentKey, Place] = {}
        self._files: Counter[int] = Counter()
        self._recent: OrderedDict[SegmentKey, tuple[bytes, Buffer]] = OrderedDict()
        self._recent_nbytes = 0

    @property
    def low(self) -> bool:
        return self.journal.low or bool(self.journal.blocked)

    @property
    def crowded(self) -> bool:
        return self.low or self.aside_nbytes > MAX_ASIDE_SHARE * self._max_bytes

    @property
    def files(self) -> set[int]:
        """Journal files in which something needed stands."""
        return set(self._files)

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None:
        nbytes = len(header) + len(body)
        place = self.journal.append(Kind.SEGMENT, *pack_segment(header, body))
        self.adopt(key, place, nbytes)
        self._recent[key] = header, body
        self._recent_nbytes += nbytes
        while self._recent_nbytes > RECENT_BYTES:
            self._forget(next(iter(self._recent)))

    def _forget(self, key: SegmentKey) -> None:
        frames = self._recent.pop(key, None)
        if frames is not None:
            self._recent_nbytes -= sum(map(len, frames))

    def adopt(self, key: SegmentKey, place: Place, nbytes: int) -> None:
        """A segment that stands in the journal already."""
        self.add(key, nbytes)
        self._places[key] = place
        self._files[place.file] += 1

    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]:
        frames = self._recent.get(key)
        return frames if frames is not None else unpack_segment(self.journal.read(self._places[key]))

    def set_aside(self, key: SegmentKey) -> None:
        super().set_aside(key)
        self._forget(key)

    def drop(self, key: SegmentKey) -> None:
        super().drop(key)
        self._forget(key)
        file = self._places.pop(key).file
        self._files[file] -= 1
        if not self._files[file]:
            del self._files[file]

    def note(self, event: AnyEvent) -> None:
        self.journal.append(Kind.EVENT, encode_event(event))

    def index(self) -> list[tuple[SegmentKey, Place, int, bool]]:
        """Key, place, bytes and whether set aside, of all segments."""
        held = [(key, self._places[key], nbytes, False) for key, nbytes in self._held.items()]
        return held + [(key, self._places[key], nbytes, True) for key, nbytes in self._aside.items()]


class Snapshot(Struct, tag_field="type", tag="snapshot", frozen=True, kw_only=True):
    """The books at one moment: what a new file of the journal begins with, so that older ones are not read again."""

    segments: list[tuple[SegmentKey, Place, int, bool]]
    tasks: list[TaskRecord]
    over: list[tuple[str, int]]
    trajectories: list[Trajectory]
    groups: list[Group]
    units: list[Unit]
    unit_count: int
    mode: DeliveryUnit
    ledger: Ledger
    lineage: Hello | None
    published: Published | None
    poison: list[bytes] = []
    """Digests of messages that broke the broker."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot(books: Books, store: JournalStore, poison: Iterable[bytes] = ()) -> bytes:
    """The books as they are now."""
    return _encoder.encode(
        Snapshot(
            segments=store.index(),
            tasks=books.tasks.live(),
            over=books.tasks.over.items(),
            trajectories=list(books.assembly.trajectories.values()),
            groups=list(books.assembly.groups.values()),
            units=books.deliveries.saved(),
            unit_count=books.deliveries.count,
            mode=books.assembly.mode,
            ledger=books.ledger,
            lineage=books.lineage,
            published=books.published,
            poison=sorted(poison),
        )
    )


def poison_of(record: Record) -> list[bytes]:
    """What a SNAPSHOT says of messages that broke the broker; nothing if it is no snapshot of ours."""
    try:
        return decoded(_decoder, record.payload).poison
    except msgspec.MsgspecError:
        return []


def recover(books: Books, store: JournalStore, records: Iterable[Record], now: float) -> int:
    """Bring empty books to where the journal ends; returns how many records there were.

    Leases of tasks are live, renewed as of ``now``; units that were on their way to the learner are ready again. Where
    damage was accepted, what rests on what is lost is left out.

    Raises:
        JournalError: a record cannot be applied: it was written by another version, or the journal was altered.
    """
    count = 0
    for record in records:
        try:
            _apply(books, store, record, now)
        except (
            msgspec.MsgspecError,
            ProtocolError,
            BrokerError,
            AssertionError,
            KeyError,
            ValueError,
        ) as error:
            if store.journal.losses and isinstance(error, BooksBroken):
                log.warning("left out, as it rests on what is lost: %s", error)
                continue
            raise JournalError(
                f"journal file {record.place.file}, offset {record.place.offset}: {error}; start a new run, or "
                "look at it with `offbeat journal verify`"
            ) from error
        count += 1
    books.deliveries.return_all(void=False)
    books.take_actions()  # said before, as far as it mattered
    books.take_notices()  # a learner that puts its tasks again is told
    if count:
        log.info(
            "recovered %d records: %d tasks, %d segments, %d units",
            count, len(books.tasks.live()), len(store), len(books.deliveries.units()),
        )  # fmt: skip
    return count


def _apply(books: Books, store: JournalStore, record: Record, now: float) -> None:
    match record.kind:
        case Kind.SNAPSHOT:
            _restore(books, store, decoded(_decoder, record.payload), now)
        case Kind.EVENT:
            books.apply(decode_event(record.payload), now)
        case Kind.SEGMENT:
            header, body = unpack_segment(record.payload)
            segment, nbytes = decode_segment(header), len(header) + len(body)
            key = (segment.trajectory_id, segment.index)
            store.adopt(key, record.place, nbytes)
            try:
                books.apply_segment(segment, nbytes, now)
            except BooksBroken:
                store.drop(key)
                raise
        case Kind.DEAD:
            pass


def _restore(books: Books, store: JournalStore, saved: Snapshot, now: float) -> None:
    for key, place, nbytes, aside in saved.segments:
        store.adopt(key, place, nbytes)
        if aside:
            store.set_aside(key)
    for part in fields(Ledger):
        setattr(books.ledger, part.name, getattr(saved.ledger, part.name))
    books.tasks.restore(saved.tasks, saved.over, now)
    books.assembly.restore(saved.trajectories, saved.groups, saved.mode, now)
    books.deliveries.restore(saved.units, saved.unit_count)
    books.lineage = saved.lineage
    if saved.published is not None:
        books.now_published(saved.published)
    assert _keys(books) == {(key, aside) for key, _, _, aside in saved.segments}, (
        "its units are not of its segments"
    )


def _keys(books: Books) -> set[tuple[SegmentKey, bool]]:
    """Of all segments that trajectories and units are made of, and whether they are committed."""
    units = books.deliveries.saved()
    committed = {(piece.key, unit.outcome is not None) for unit in units for piece in unit.pieces}
    return committed | {(piece.key, False) for piece in books.assembly.pieces()}
