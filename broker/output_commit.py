"""The `Dispatcher` with its journal: recovery at the start, and answers that leave once their records are safe.

Segments and events are in the journal, and snapshots of the state. Messages that could not be handled are kept in the
journal as dead letters, with the reason, and are known again if they broke the broker.
"""

import hashlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.core.fleet import FOR_EVER, Limits
from broker.core.peers import Send
from broker.core.records import (
    OUTCOMES,
    AnyEvent,
    Counted,
    GroupRecord,
    Ledger,
    Published,
    SegmentStore,
    Tally,
    TaskRecord,
    TrajectoryRecord,
    Unit,
    decode_event,
    encode_event,
)
from broker.core.state import BrokerState
from broker.core.units import LearnerSteps
from broker.errors import BrokerError, JournalError, StateBroken
from broker.journal.journal import Journal
from broker.journal.writer import (
    MAX_PAYLOAD_BYTES,
    DeadLetter,
    Kind,
    Place,
    Record,
    pack_dead_letter,
    pack_segment,
    unpack_dead_letter,
    unpack_segment,
)
from protocol.codec import AnyMessage, Buffer, decode_payload, decode_segment
from protocol.errors import ProtocolError
from protocol.messages.fields import DeliveryUnit
from protocol.messages.peers import ActorKeys, Echo, Heartbeat, Hello, QueueStats, Refused
from protocol.names import SegmentKey

log = logging.getLogger(__name__)

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

    def __init__(self, journal: Journal, max_bytes: int, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.journal, self._max_bytes, self._wall_clock = journal, max_bytes, wall_clock
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
        place = self.journal.append(Kind.SEGMENT, *pack_segment(header, body, self._wall_clock()))
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
        self.journal.append(Kind.EVENT, encode_event(event, self._wall_clock()))

    def index(self) -> list[tuple[SegmentKey, Place, int, bool]]:
        """Return key, place, bytes and whether committed, for every segment."""
        held = [(key, self._places[key], nbytes, False) for key, nbytes in self._held.items()]
        return held + [(key, self._places[key], nbytes, True) for key, nbytes in self._committed.items()]


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


NOT_APPLIED = (msgspec.MsgspecError, ProtocolError, BrokerError, AssertionError, KeyError, ValueError)
"""What `apply_record` raises for a record that another version wrote, that was altered, or that rests on lost ones."""


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
            apply_record(state, store, record, now)
        except NOT_APPLIED as error:
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
    state.outbox.take_queued()
    # Ignore the notices: a learner that puts its tasks again gets new ones.
    state.take_notices()
    if count:
        log.info(
            "recovered %d records: %d tasks, %d segments, %d units",
            count, len(state.tasks.live()), len(store), len(state.deliveries.units()),
        )  # fmt: skip
    return count


class Adopting(SegmentStore, Protocol):
    """Store that takes segments which the journal has already."""

    def adopt(self, key: SegmentKey, place: Place, nbytes: int) -> None: ...


def apply_record(state: BrokerState, store: Adopting, record: Record, now: float) -> None:
    """Apply one record of a journal to a state. A SNAPSHOT needs an empty one.

    Raises:
        StateBroken: the record does not fit the state.
        msgspec.MsgspecError, ProtocolError, BrokerError, AssertionError, KeyError, ValueError: it cannot be read.
    """
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


def _restore(state: BrokerState, store: Adopting, saved: Snapshot, now: float) -> None:
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


MAX_DEAD_LETTERS = 1_000
"""Upper limit of the dead letters that one process keeps."""
MAX_DEAD_TOTAL_BYTES = 16 << 20
"""Upper limit of the bytes of all dead letters that one process keeps."""
MAX_DEAD_BYTES = 64 * 1024
"""Upper limit of the bytes of one dead letter, all frames together."""
MAX_DEAD_FRAMES = 64
MAX_DEAD_REASON = 1_000
"""Upper limit of the characters of a dead letter's reason."""
POISON = "broker_fault"


class DeadLetters:
    """The dead letters of one process, and the poison: messages that broke the broker, now or before."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self.poison: set[bytes] = set()
        """Digests of messages that broke the broker."""
        self.count = self._nbytes = 0

    def go_on_in(self, journal: Journal) -> None:
        """Keep the next letters in a journal that was opened again.

        The count begins again, because without the next dead letter the next process would break, too.
        """
        self._journal = journal
        self.count = self._nbytes = 0

    def is_poison(self, name: str, frames: Sequence[Buffer]) -> bool:
        """Return whether this message of the peer ``name`` broke the broker before."""
        return bool(self.poison) and _digest(name, frames) in self.poison

    def keep(self, name: str, code: str, reason: str, frames: Sequence[Buffer]) -> None:
        """Keep a message that could not be handled, with the reason, as a dead letter.

        A process keeps its first `MAX_DEAD_LETTERS`, up to `MAX_DEAD_TOTAL_BYTES`. While the disk is nearly full
        it keeps only those of messages that broke the broker, which the next process must know.
        """
        digest = _digest(name, frames) if code == POISON else b""
        if digest:
            self.poison.add(digest)
        journal = self._journal
        if journal is None or self.count >= MAX_DEAD_LETTERS or self._nbytes >= MAX_DEAD_TOTAL_BYTES:
            return
        if code != POISON and (journal.low or journal.blocked):
            return
        letter = DeadLetter(
            peer=name,
            code=code,
            reason=reason[:MAX_DEAD_REASON],
            frames=_first_bytes(frames),
            nbytes=sum(map(len, frames)),
            digest=digest,
        )
        packed = pack_dead_letter(letter)
        self.count += 1
        self._nbytes += len(packed)
        journal.append(Kind.DEAD, packed)

    def note(self, record: Record) -> Record:
        """Learn the poison that a record of the journal tells of; return the record."""
        if record.kind is Kind.SNAPSHOT:
            self.poison.update(poison_of(record))
        elif record.kind is Kind.DEAD:
            letter = unpack_dead_letter(record.payload)
            if letter.code == POISON:
                self.poison.add(letter.digest or _digest(letter.peer, letter.frames))
        return record


def _first_bytes(frames: Sequence[Buffer]) -> list[bytes]:
    """Return the first frames of a message, cut to `MAX_DEAD_BYTES` in sum.

    Example:
        >>> [len(frame) for frame in _first_bytes([b"x" * 60_000, b"y" * 60_000, b"z"])]
        [60000, 5536]
    """
    kept, room = list[bytes](), MAX_DEAD_BYTES
    for frame in frames[:MAX_DEAD_FRAMES]:
        if not room and len(frame):
            break
        kept.append(bytes(frame[:room]))
        room -= len(kept[-1])
    return kept


def _digest(name: str, frames: Sequence[Buffer]) -> bytes:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape"))
    for frame in frames:
        # Letters of earlier versions have these bytes of each frame, and no digest.
        digest.update(b"/" + bytes(frame[: 64 * 1024]))
    return digest.digest()


NEED_NOT_WAIT = (ActorKeys, Echo, Heartbeat, QueueStats, Refused)
"""Messages that promise nothing, so they need not wait for the journal."""
POISONED = "this message broke the broker before"


class Bell:
    """A bell that the journal's thread rings when more records are durable.

    Invariant: ``heard`` runs on the thread of the journal.
    """

    def __init__(self) -> None:
        self.heard: Callable[[], object] = lambda: None

    def ring(self) -> None:
        self.heard()


class OutputCommit:
    """Holds back every message until the journal has the records it rests on.

    ``bell`` rings, from any thread, when `release` may have messages to send.
    """

    def __init__(self, dispatcher: Dispatcher, journal: Journal | None, store: JournalStore | None) -> None:
        self.dispatcher, self.journal = dispatcher, journal
        self.address: Callable[[str], str | None] = lambda peer: peer
        """Returns the address of a peer's connection, by which `Send.peer` names it while a message waits."""
        self._store = store
        self._reopen: Callable[[], Journal]
        self._waiting: deque[tuple[int, Send]] = deque()
        self.dead_letters = DeadLetters(journal)
        self._freed = 0
        """`JournalStore.freed` when needless files were last deleted; -1: look for them at the next flush."""
        self._blocked = ""
        self._broken = False
        self.bell = Bell()

    @classmethod
    def open(
        cls,
        config: BrokerConfig,
        run: str,
        max_policy_lag: int,
        folder: Path | None,
        accept_loss: bool = False,
        limits: Limits = FOR_EVER,
    ) -> "OutputCommit":
        """Open the journal and recover the state from it. Without a ``folder`` the state is empty.

        Raises:
            JournalError: the journal belongs to another run, is in use, or is damaged.
        """
        now, boot = time.monotonic(), format(time.time_ns(), "x")
        if folder is None:
            return cls(
                Dispatcher(config, run=run, max_policy_lag=max_policy_lag, now=now, boot=boot, limits=limits),
                None,
                None,
            )
        reopen = partial(Journal.open, folder, run=run, config=config.journal)
        bell = Bell()
        journal = reopen(accept_loss=accept_loss, on_durable=bell.ring)
        store = JournalStore(journal, config.journal.max_bytes)
        dispatcher = Dispatcher(
            config,
            run=run,
            max_policy_lag=max_policy_lag,
            now=now,
            store=store,
            boot=boot,
            limits=limits,
        )
        output_commit = cls(dispatcher, journal, store)
        output_commit._reopen = reopen
        output_commit.bell = bell
        try:
            recover(dispatcher.state, store, map(output_commit.dead_letters.note, journal.recovered()), now)
        except BaseException:
            journal.abandon()
            raise
        return output_commit

    # --- messages in --------------------------------------------------------------------------------------

    def objection(self, name: str, hello: Hello, frames: Sequence[Buffer]) -> Refused | None:
        """Return the refusal that the peer ``name`` would get for this Hello, or None. Changes nothing."""
        if self.dead_letters.is_poison(name, frames):
            return Refused(code="poison", message=POISONED)
        return self.dispatcher.objection(name, hello)

    def handle(self, name: str, message: AnyMessage, frames: Sequence[Buffer], now: float) -> list[Send]:
        """Handle one message of a peer; return the messages that may leave at once.

        Raises:
            StateBroken: the process must end and restart from its journal. The journal notes the message as poison
                if it broke the state itself, or if the fault came from what it had changed.
            JournalError: the state is broken, and the journal cannot be opened again.
        """
        # Half of a change is applied, so no message that comes now is to blame.
        if self._broken:
            return []
        if self.dead_letters.is_poison(name, frames):
            return self._may_leave(self.dispatcher.refuse(name, "poison", POISONED))
        before = self.journal.sequence if self.journal is not None else 0
        try:
            self.dispatcher.act_on(name, message, frames, now)
        except StateBroken as error:
            self._start_over(str(error), name, frames)
            raise
        except Exception as error:
            # One message must not end the run.
            log.exception("%s from %r could not be handled", type(message).__name__, name)
            self.dead_letters.keep(name, POISON, repr(error), frames)
            return self.refuse(name, POISON, "a fault of the broker; its log has the details")
        try:
            return self._may_leave(self.dispatcher.follow(now))
        except Exception as error:
            # A message that changed nothing that lasts, for example a heartbeat, comes again with equal bytes.
            # It only came first after something else had gone wrong.
            is_to_blame = self.journal is not None and self.journal.sequence > before
            raise self._broken_by(error, name, frames if is_to_blame else ()) from error

    def _broken_by(self, error: Exception, name: str = "", frames: Sequence[Buffer] = ()) -> StateBroken:
        """Start over after a fault in what follows from messages; return the error to raise."""
        broken = error if isinstance(error, StateBroken) else StateBroken(f"the state is broken: {error!r}")
        self._start_over(str(broken), name, frames)
        return broken

    def _start_over(self, reason: str, name: str, frames: Sequence[Buffer]) -> None:
        """Abandon unwritten records, on which no sent message rests. Note the message as poison, if one is given."""
        self._broken = True
        if self.journal is not None:
            self.journal.abandon()
        if self.journal is not None and frames:
            self.journal = self._reopen()
            self.dead_letters.go_on_in(self.journal)
            self.dead_letters.keep(name, POISON, reason, frames)
            self.journal.close()

    def tick(self, now: float) -> list[Send]:
        """Do what is due at this time; return the messages that may leave at once.

        Raises:
            StateBroken: the process must end and restart from its journal.
        """
        try:
            return self._may_leave(self.dispatcher.tick(now))
        except Exception as error:
            raise self._broken_by(error) from error

    def refuse(self, name: str, code: str, text: str) -> list[Send]:
        """Refuse a message of a peer; return the messages that may leave at once."""
        return self._may_leave(self.dispatcher.refuse(name, code, text))

    def admit(self, actor_keys: Sequence[str], revoked: Sequence[str], now: float) -> list[Send]:
        """Note which keys are admitted now; return the messages that may leave at once."""
        return self._may_leave(self.dispatcher.admit(actor_keys, revoked, now))

    def drain(self, reason: str, now: float) -> list[Send]:
        return self._may_leave(self.dispatcher.drain(reason, now))

    def ask_to_leave(self, name: str, reason: str, now: float) -> list[Send]:
        """Ask a peer, or all peers of a host, to finish; return the messages that may leave at once."""
        return self._may_leave(self.dispatcher.ask_to_leave(name, reason, now))

    # --- messages out -------------------------------------------------------------------------------------

    def _may_leave(self, actions: list[Send]) -> list[Send]:
        if self.journal is None:
            return actions
        at_once, sequence = list[Send](), self.journal.sequence
        for action in actions:
            if isinstance(action.message, NEED_NOT_WAIT):
                at_once.append(action)
            elif (address := self.address(action.peer)) is not None:
                # Address the connection, because the name may belong to another process when this leaves.
                self._waiting.append((sequence, Send(address, action.message, action.frames)))
        return at_once

    def flush(self) -> list[Send]:
        """Have the journal write what is buffered; return the messages that may leave now.

        Raises:
            JournalError: the process must end, and restart from its journal.
        """
        if self.journal is None:
            return []
        self.journal.flush()
        if self.journal.blocked != self._blocked:
            self._blocked = self.journal.blocked
            log.error("the journal cannot be written: %s", self._blocked or "it can, again")
        try:
            self._look_after_files(self.journal)
        except BrokerError:
            raise
        except Exception as error:
            # Without snapshots no file would ever be deleted again, and nobody would notice.
            raise JournalError(f"the journal cannot go on in another file: {error!r}") from error
        return self.release()

    def _look_after_files(self, journal: Journal) -> None:
        assert self._store is not None
        if journal.wants_snapshot:
            saved = snapshot(self.dispatcher.state, self._store, self.dead_letters.poison)
            if len(saved) > MAX_PAYLOAD_BYTES:
                journal.postpone(len(saved))
            else:
                journal.rotate(saved)
                # The new snapshot makes files needless that the last `retain` had to keep.
                self._freed = -1
        if (journal.low or self._freed != self._store.freed) and not journal.releasing:
            self._freed = self._store.freed
            journal.retain(self._store.files)

    def release(self) -> list[Send]:
        """Return the messages that waited for the journal and may leave now."""
        out, waiting = list[Send](), self._waiting
        durable = self.journal.durable if self.journal is not None else -1
        while waiting and waiting[0][0] <= durable:
            out.append(waiting.popleft()[1])
        return out

    def status(self) -> dict[str, Any]:
        """Return the state of the journal, for `/status`."""
        if self.journal is None:
            return {"kind": "memory: all is lost with the process"}
        return {
            "kind": "files",
            "bytes": self.journal.nbytes,
            "records": self.journal.sequence,
            "records_not_durable": self.journal.sequence - self.journal.durable,
            "messages_waiting": len(self._waiting),
            "blocked": self.journal.blocked,
            "low": self.journal.low,
            "why_low": self.journal.why_low,
            "dead_letters": self.dead_letters.count,
        }

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
