"""BrokerState that outlive the process: snapshots, and the way back from them and the records behind."""

import logging
from collections.abc import Iterable
from dataclasses import fields

import msgspec
from msgspec import Struct

from broker.core.events import Published, decode_event
from broker.core.ledger import Ledger
from broker.core.records import GroupRecord, TaskRecord, TrajectoryRecord, Unit
from broker.core.state import BrokerState
from broker.errors import BrokerError, StateBroken
from broker.journal.journal import JournalError, Kind, Place, Record, unpack_segment
from broker.journal_store import JournalStore
from protocol.codec import decode_payload, decode_segment
from protocol.errors import ProtocolError
from protocol.messages import DeliveryUnit, Hello
from protocol.names import SegmentKey

log = logging.getLogger(__name__)


class Snapshot(Struct, tag_field="type", tag="snapshot", frozen=True, kw_only=True):
    """The books at one moment: what a new file of the journal begins with, so that older ones are not read again."""

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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot(state: BrokerState, store: JournalStore, poison: Iterable[bytes] = ()) -> bytes:
    """The books as they are now."""
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
        )
    )


def poison_of(record: Record) -> list[bytes]:
    """What a SNAPSHOT says of messages that broke the broker; nothing if it is no snapshot of ours."""
    try:
        return decode_payload(_decoder, record.payload).poison
    except msgspec.MsgspecError:
        return []


def recover(state: BrokerState, store: JournalStore, records: Iterable[Record], now: float) -> int:
    """Bring empty books to where the journal ends; returns how many records there were.

    Leases of tasks are live, renewed as of ``now``; units that were on their way to the learner are ready again. Where
    damage was accepted, what rests on what is lost is left out.

    Raises:
        JournalError: a record cannot be applied: it was written by another version, or the journal was altered.
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
    state.take_actions()  # said before, as far as it mattered
    state.take_notices()  # a learner that puts its tasks again is told
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
    for key, place, nbytes, aside in saved.segments:
        store.adopt(key, place, nbytes)
        if aside:
            store.commit(key)
    for part in fields(Ledger):
        setattr(state.ledger, part.name, getattr(saved.ledger, part.name))
    state.tasks.restore(saved.tasks, saved.over, now)
    state.assembly.restore(saved.trajectories, saved.groups, saved.mode, now)
    state.deliveries.restore(saved.units, saved.unit_count)
    state.lineage = saved.lineage
    if saved.published is not None:
        state.now_published(saved.published)
    assert _keys(state) == {(key, aside) for key, _, _, aside in saved.segments}, (
        "its units are not of its segments"
    )


def _keys(state: BrokerState) -> set[tuple[SegmentKey, bool]]:
    """Of all segments that trajectories and units are made of, and whether they are committed."""
    units = state.deliveries.saved()
    committed = {(stored.key, unit.outcome is not None) for unit in units for stored in unit.segments}
    return committed | {(stored.key, False) for stored in state.assembly.segments()}
