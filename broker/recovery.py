"""The broker's state on disk: segments and events in the journal, snapshots, and recovery from both."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import fields

import msgspec
from msgspec import Struct

from broker.core.deliveries import LearnerSteps
from broker.core.ledger import OUTCOMES, Ledger, Tally
from broker.core.records import (
    AnyEvent,
    Counted,
    GroupRecord,
    Published,
    TaskRecord,
    TrajectoryRecord,
    Unit,
    decode_event,
    encode_event,
)
from broker.core.state import BrokerState
from broker.errors import BrokerError, JournalError, StateBroken
from broker.journal.journal import Journal
from broker.journal.records import Kind, Place, Record, pack_segment, unpack_segment
from protocol.codec import Buffer, decode_payload, decode_segment
from protocol.errors import ProtocolError
from protocol.messages.fields import DeliveryUnit
from protocol.messages.peers import Hello
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


log = logging.getLogger(__name__)


class Snapshot(Struct, tag_field="type", tag="snapshot", frozen=True, kw_only=True):
    """The lasting state at one moment. A journal file begins with it, and recovery skips older records."""

    segments: list[tuple[SegmentKey, Place, int, bool]]
    tasks: list[TaskRecord]
    over: list[tuple[str, int]]
    trajectories: list[TrajectoryRecord]
    groups: list[GroupRecord]
    units: list[Unit]
    unit_count: int
    mode: DeliveryUnit
    ledger: Ledger
    lineage: Hello | None
    published: Published | None
    poison: list[bytes] = []
    """Digests of messages that broke the broker."""
    steps: LearnerSteps | None = None
    """None in a snapshot of an earlier version."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot(state: BrokerState, store: JournalStore, poison: Iterable[bytes] = ()) -> bytes:
    """Encode the state as it is now."""
    return _encoder.encode(
        Snapshot(
            segments=store.index(),
            tasks=state.tasks.live(),
            over=state.tasks.over.items(),
            trajectories=list(state.assembly.trajectories.values()),
            groups=list(state.assembly.groups.values()),
            units=state.deliveries.saved(),
            unit_count=state.deliveries.count,
            mode=state.assembly.mode,
            ledger=state.ledger,
            lineage=state.lineage,
            published=state.published,
            poison=sorted(poison),
            steps=state.steps,
        )
    )


def poison_of(record: Record) -> list[bytes]:
    """Return the digests of messages that broke the broker, from a SNAPSHOT; none if it cannot be decoded."""
    try:
        return decode_payload(_decoder, record.payload).poison
    except msgspec.MsgspecError:
        return []


def recover(state: BrokerState, store: JournalStore, records: Iterable[Record], now: float) -> int:
    """Bring an empty state to where the journal ends; return the number of records applied.

    Tasks keep their leases, which are renewed at ``now``. Units that were leased to the learner are ready
    again. Where damage was accepted, records that rest on lost ones are left out.

    Raises:
        JournalError: a record cannot be applied, because another version wrote it or the journal was altered.
    """
    count = 0
    for record in records:
        try:
            _apply(state, store, record, now)
        except (
            msgspec.MsgspecError,
            ProtocolError,
            BrokerError,
            AssertionError,
            KeyError,
            ValueError,
        ) as error:
            if store.journal.losses and isinstance(error, StateBroken):
                log.warning("left out, as it rests on what is lost: %s", error)
                continue
            raise JournalError(
                f"journal file {record.place.file}, offset {record.place.offset}: {error}; start a new run, or "
                "look at it with `offbeat journal verify`"
            ) from error
        count += 1
    state.deliveries.expire_all(void=False)
    # Ignore the messages: the process before sent them, as far as they mattered.
    state.outbox.take()
    # Ignore the notices: a learner that puts its tasks again gets new ones.
    state.take_notices()
    if count:
        log.info(
            "recovered %d records: %d tasks, %d segments, %d units",
            count, len(state.tasks.live()), len(store), len(state.deliveries.units()),
        )  # fmt: skip
    return count


def _apply(state: BrokerState, store: JournalStore, record: Record, now: float) -> None:
    match record.kind:
        case Kind.SNAPSHOT:
            _restore(state, store, decode_payload(_decoder, record.payload), now)
        case Kind.EVENT:
            state.apply(decode_event(record.payload), now)
        case Kind.SEGMENT:
            header, body = unpack_segment(record.payload)
            segment, nbytes = decode_segment(header), len(header) + len(body)
            key = (segment.trajectory_id, segment.index)
            store.adopt(key, record.place, nbytes)
            try:
                state.apply_segment(segment, nbytes, now)
            except StateBroken:
                store.drop(key)
                raise
        case Kind.DEAD:
            pass


def _restore(state: BrokerState, store: JournalStore, saved: Snapshot, now: float) -> None:
    for key, place, nbytes, committed in saved.segments:
        store.adopt(key, place, nbytes)
        if committed:
            store.commit(key)
    for part in fields(Ledger):
        setattr(state.ledger, part.name, getattr(saved.ledger, part.name))
    # An earlier version knew fewer outcomes.
    for outcome in OUTCOMES:
        state.ledger.outcomes.setdefault(outcome, Tally())
    state.tasks.restore(saved.tasks, saved.over, now)
    state.assembly.restore(saved.trajectories, saved.groups, saved.mode, now)
    state.deliveries.restore(saved.units, saved.unit_count)
    state.lineage = saved.lineage
    state.steps = saved.steps or _steps_of(saved)
    if saved.published is not None:
        state.now_published(saved.published)
    assert _keys(state) == {(key, committed) for key, _, _, committed in saved.segments}, (
        "its units are not of its segments"
    )


def _steps_of(saved: Snapshot) -> LearnerSteps:
    """Return what a snapshot of an earlier version tells of the learner's steps."""
    step = saved.lineage.step if saved.lineage is not None else 0
    return LearnerSteps(committed=max([step, *(unit.step for unit in saved.units)]), released=step)


def _keys(state: BrokerState) -> set[tuple[SegmentKey, bool]]:
    """Return the keys of all segments in trajectories and units, each with whether it is committed."""
    units = state.deliveries.saved()
    committed = {(stored.key, unit.outcome is not None) for unit in units for stored in unit.segments}
    return committed | {(stored.key, False) for stored in state.assembly.segments()}
