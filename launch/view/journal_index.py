"""An index of the trajectories in a broker's journal, which grows with the journal.

The broker's own state machine is driven by the records, so that every segment has the outcome that the broker's ledger
gave it. The index keeps places, counts and outcomes, and no token: tokens are read when somebody looks at them.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from broker.config import BrokerConfig
from broker.core.records import (
    AnyEvent,
    Committed,
    Counted,
    Delivered,
    LearnerJoined,
    Ledger,
    Outcome,
    Published,
    StoredSegment,
    decode_event,
)
from broker.core.state import BrokerState
from broker.errors import JournalError
from broker.journal.files import numbers
from broker.journal.writer import (
    HEAD_BYTES,
    Kind,
    Place,
    Record,
    arrival_of,
    file_name,
    record_at,
    scan,
    unpack_header,
    unpack_segment,
)
from broker.output_commit import NOT_APPLIED, apply_record
from protocol import names
from protocol.arrays import Int32s
from protocol.codec import Buffer, decode_segment, unpack_arrays
from protocol.errors import ProtocolError
from protocol.failures import describe, failure_or_text
from protocol.messages.episodes import Segment
from protocol.names import SegmentKey

CHUNK_BYTES = 4 << 20
"""Bytes that are read at a time. A record that is longer is read whole."""
MAX_ROWS = 500_000
"""Most trajectories that are kept; later ones are counted, and the page says so."""
MAX_EQUAL = 10_000
UNKNOWN = "unknown"
"""Outcome of segments whose records of it are deleted or damaged."""


@dataclass(slots=True)
class Piece:
    """One segment of a trajectory."""

    index: int
    place: Place
    tokens: int
    action_tokens: int
    versions: tuple[tuple[int, int], ...]
    """Pairs of a policy version and the action tokens that it sampled."""
    at: float | None
    """Wall clock of its arrival, in seconds since 1970; None if the journal does not say."""
    outcome: str = ""
    """Outcome in the broker's ledger; "" while it has none."""
    step: int = -1
    """Learner step whose commit gave the outcome; -1 if no commit did. 0 is the evaluation before the first step."""
    lags: tuple[tuple[int, int], ...] = ()
    """Pairs of a policy lag and its action tokens, if the piece was trained."""


@dataclass(slots=True)
class Row:
    """One trajectory."""

    trajectory: str
    task: str
    group: str
    group_size: int
    env: str
    purpose: str
    generator: str
    temperature: float
    place: int = 0
    """Number of the row in the index."""
    status: str = "unfinished"
    stop_reason: str = ""
    failure: str = ""
    correct: bool | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Sums of the environment's rewards, by name."""
    turns: int = 0
    """Turns so far, prompt and observations included."""
    pieces: list[Piece] = field(default_factory=list)

    def piece(self, index: int) -> Piece | None:
        """Return a segment by its number. They arrive in order, so its place is known."""
        place = index - self.pieces[0].index if self.pieces else -1
        return self.pieces[place] if 0 <= place < len(self.pieces) else None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def action_tokens(self) -> int:
        return sum(piece.action_tokens for piece in self.pieces)

    @property
    def outcome(self) -> str:
        """Outcome of its segments; "held" while they have none, and several names where they differ."""
        found = dict.fromkeys(piece.outcome or "held" for piece in self.pieces)
        return " and ".join(found)

    @property
    def step(self) -> int:
        """Learner step that took its last piece; -1 while none did."""
        return max((piece.step for piece in self.pieces), default=-1)

    @property
    def lag(self) -> int | None:
        """Largest policy lag of a token when it was trained; None if it was not."""
        # The table asks this of all rows; a list is faster than a generator.
        found = [lag for piece in self.pieces for lag, _ in piece.lags]
        return max(found) if found else None

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version of a token; None if none was sampled."""
        found = [version for piece in self.pieces for version, _ in piece.versions]
        return (min(found), max(found)) if found else None


@dataclass(slots=True)
class Commit:
    """A commit of the learner, or a version that it published."""

    step: int
    version: int
    at: float | None
    units: int = 0
    lineage: int = 0


@dataclass
class Progress:
    """How far the journal is read."""

    done_bytes: int = 0
    total_bytes: int = 0
    whole: bool = False
    """True if everything that was there at the last look is read."""
    deleted_below: int = 0
    """Files below this number are deleted; 0: none is."""
    deleted_until_step: int | None = None
    """Learner step that the deleted files reached; None if none is deleted, or nothing says so."""
    damage: list[str] = field(default_factory=list)
    unreadable_segments: int = 0
    left_out: int = 0
    """Trajectories beyond `MAX_ROWS`."""
    missing: bool = False
    """True if the folder has no journal."""


class _TracedLedger(Ledger):
    """Ledger that says which segments got an outcome."""

    def __init__(self, told: Callable[[str, SegmentKey], None]) -> None:
        super().__init__()
        self._told = told

    def note_outcome(self, outcome: Outcome, *segments: StoredSegment) -> None:
        super().note_outcome(outcome, *segments)
        for stored in segments:
            self._told(outcome, stored.key)

    def undo_outcome(self, outcome: Outcome, stored: StoredSegment) -> None:
        super().undo_outcome(outcome, stored)
        self._told("", stored.key)


class _Places(Counted):
    """Store that knows which segments are held, and has none of their bytes."""

    low = crowded = False

    def adopt(self, key: SegmentKey, place: Place, nbytes: int) -> None:
        self.add(key, nbytes)

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None:
        raise AssertionError("an index stores nothing")

    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]:
        raise AssertionError("an index has no bytes")

    def record_event(self, event: AnyEvent) -> None:
        raise AssertionError("an index records nothing")


class JournalIndex:
    """The index of one journal.

    Args:
        folder: the journal's folder.
        max_policy_lag: the run's bound, which the broker's state needs.

    Invariant: whoever reads rows holds `lock`; `advance` takes it for one chunk at a time.
    """

    def __init__(self, folder: Path, max_policy_lag: int) -> None:
        self.folder, self._bound = folder, max_policy_lag
        self.lock = threading.RLock()
        self.rows: list[Row] = []
        self.by_id: dict[str, Row] = {}
        self.groups: dict[str, list[Row]] = {}
        self.commits: list[Commit] = []
        self.published: list[Commit] = []
        self.learners: list[Commit] = []
        """Learners that joined: their step, their epoch as the version, and their lineage."""
        self.delivered: dict[str, float | None] = {}
        """Wall clock of the newest delivery of each unit, in seconds since 1970."""
        self.progress = Progress()
        self.turn_seconds = {"waited": 0.0, "sampled": 0.0, "tools": 0.0}
        """Seconds of all turns: waited for an engine, sampled, and in tools and environment. See `TurnTime`."""
        self.changes = 0
        """Number of records taken so far; pages that were computed at an earlier number are old."""
        self.touched: set[int] = set()
        """Numbers of the rows that are new or have changed since whoever keeps columns of them last looked."""
        self._file, self._offset = 0, 0
        self._state: BrokerState | None = None
        self._event: AnyEvent | None = None
        self._units: dict[str, list[SegmentKey]] = {}
        """Segments of the units that a commit named, while a checkpoint may still be undone."""
        self._told: list[tuple[str, SegmentKey]] = []
        self._equal: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}
        """Equal pairs of versions, or of lags, which pieces share."""

    # --- reading ------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Read one more chunk. Return whether there was something to read."""
        present = numbers(self.folder)
        with self.lock:
            self._look_at_files(present)
            if not present:
                self.progress.missing = not self.rows
                self.progress.whole = True
                return False
            self.progress.missing = False
            if self._file not in present:
                later = [number for number in present if number > self._file]
                if not later:
                    self.progress.whole = True
                    return False
                self._begin(later[0])
            read = self._chunk(newest=self._file == present[-1])
            if not read and self._file != present[-1]:
                self._begin(next(number for number in present if number > self._file))
                read = True
            self.progress.whole = not read
            return read

    def _look_at_files(self, present: list[int]) -> None:
        sizes = {}
        for number in present:
            try:
                sizes[number] = (self.folder / file_name(number)).stat().st_size
            except OSError:
                # It was deleted meanwhile.
                continue
        before = sum(size for number, size in sizes.items() if number < self._file)
        self.progress.done_bytes = before + (self._offset if self._file in sizes else 0)
        self.progress.total_bytes = sum(sizes.values())
        released = numbers(self.folder, ".released")
        if released:
            self.progress.deleted_below = max(self.progress.deleted_below, released[-1] + 1)

    def _begin(self, number: int) -> None:
        """Go on at the beginning of a file."""
        if number != self._file + 1:
            # The state does not know what the files between did; this one's snapshot does.
            self._state = None
        self._file, self._offset = number, 0

    def _chunk(self, *, newest: bool) -> bool:
        size = CHUNK_BYTES
        try:
            with open(self.folder / file_name(self._file), "rb") as file:
                length = os.fstat(file.fileno()).st_size
                while True:
                    file.seek(self._offset)
                    data = file.read(size)
                    end = self._offset + len(data) >= length
                    used = self._take(data, last=end and not newest)
                    if used or end:
                        break
                    size *= 2
        except OSError as error:
            if not (self.folder / file_name(self._file)).exists():
                return False
            self._damage(f"{file_name(self._file)}: {error.strerror}")
            return False
        self._offset += used
        return used > 0

    def _take(self, data: bytes, *, last: bool) -> int:
        """Take the whole records at the beginning of some bytes of the file; return how many bytes they are.

        Args:
            last: the bytes end the file, and nobody will write behind them.
        """
        at = 0
        if not self._offset:
            head = unpack_header(data)
            if head is None:
                if last:
                    self._damage(f"{file_name(self._file)}: its head is cut or damaged")
                    return len(data)
                return 0
            at = head[1]
            if self._state is None and head[0].first == 0:
                self._state = self._new_state()
        while at < len(data):
            found = record_at(data, at)
            if found is None:
                item = next(iter(scan(data, self._file, at)))
                # Nothing whole follows: the writer is not done, or more of the file has to be read.
                if getattr(item, "torn", True) and not last:
                    break
                self._damage(
                    f"{file_name(self._file)}, byte {self._offset + at}: {getattr(item, 'what', '')}"
                )
                self._state = None
                at += getattr(item, "nbytes", len(data) - at)
                continue
            _, kind, end = found
            place = Place(self._file, self._offset + at + HEAD_BYTES, end - at - HEAD_BYTES)
            self._record(Record(kind, data[at + HEAD_BYTES : end], place))
            at = end
        return at

    def _damage(self, what: str) -> None:
        if len(self.progress.damage) < 100:
            self.progress.damage.append(what)

    # --- records ------------------------------------------------------------------------------------------

    def _record(self, record: Record) -> None:
        self.changes += 1
        match record.kind:
            case Kind.DEAD:
                return
            case Kind.SNAPSHOT:
                if self._state is None:
                    self._restore(record)
                return
            case Kind.SEGMENT:
                self._segment(record)
            case Kind.EVENT:
                self._note_event(record)
        if self._state is None:
            return
        try:
            apply_record(self._state, self._state.store, record, 0.0)  # type: ignore[arg-type]
        except NOT_APPLIED as error:
            self._damage(f"{file_name(record.place.file)}, byte {record.place.offset}: {error}")
            self._state = None
        else:
            self._state.take_notices()
            self._state.outbox.take_queued()
        self._settle()

    def _new_state(self) -> BrokerState:
        ledger = _TracedLedger(lambda outcome, key: self._told.append((outcome, key)))
        return BrokerState(BrokerConfig(), _Places(), self._bound, ledger=ledger)

    def _restore(self, record: Record) -> None:
        """Begin with a snapshot, because the files before it are deleted or damaged."""
        state = self._new_state()
        try:
            apply_record(state, state.store, record, 0.0)  # type: ignore[arg-type]
        except NOT_APPLIED as error:
            self._damage(f"{file_name(record.place.file)}: a snapshot that cannot be read: {error}")
            return
        self._told.clear()
        self._state = state
        if not self.rows and record.place.file > 1:
            self.progress.deleted_until_step = state.steps.committed
        units = state.deliveries.saved()
        known = {stored.key: (unit.outcome or "", unit.step) for unit in units for stored in unit.segments}
        held = {stored.key for stored in state.assembly.segments()}
        self.touched.update(row.place for row in self.rows)
        for row in self.rows:
            for piece in row.pieces:
                key = (row.trajectory, piece.index)
                if key in known:
                    outcome, step = known[key]
                    piece.outcome, piece.step = outcome, step if outcome else -1
                elif not piece.outcome and key not in held:
                    piece.outcome = UNKNOWN

    def _segment(self, record: Record) -> None:
        try:
            header, body = unpack_segment(record.payload)
            segment = decode_segment(header)
            versions = self._shared(_versions(segment, body))
        except (ProtocolError, JournalError, ValueError):
            self.progress.unreadable_segments += 1
            return
        row = self.by_id.get(segment.trajectory_id)
        if row is None:
            if len(self.rows) >= MAX_ROWS:
                self.progress.left_out += segment.index == 0
                return
            row = Row(
                segment.trajectory_id, segment.task_id, segment.group_id, segment.group_size,
                sys.intern(segment.env), sys.intern(segment.purpose), sys.intern(segment.generator),
                segment.temperature, len(self.rows),
            )  # fmt: skip
            self.rows.append(row)
            self.by_id[row.trajectory] = row
            self.groups.setdefault(row.group, []).append(row)
        self.touched.add(row.place)
        row.status, row.stop_reason = sys.intern(segment.status), sys.intern(segment.stop_reason)
        if segment.status == "failed":
            row.failure = describe(failure_or_text(segment.failure, segment.error))
        correct = segment.extra.get("correct")
        row.correct = row.correct if correct is None else bool(correct)
        for time in segment.times:
            self.turn_seconds["waited"] += time.waited
            self.turn_seconds["sampled"] += time.sampled
            self.turn_seconds["tools"] += time.tools
        for reward in segment.rewards:
            name = sys.intern(reward.name)
            row.rewards[name] = row.rewards.get(name, 0.0) + reward.value
        row.turns = max(row.turns, max((turn.index + 1 for turn in segment.turns), default=0))
        row.pieces.append(
            Piece(
                segment.index,
                record.place,
                segment.tokens,
                segment.action_tokens,
                versions,
                arrival_of(record.payload),
            )
        )

    def _note_event(self, record: Record) -> None:
        try:
            event = decode_event(record.payload)
        except NOT_APPLIED:
            self._event = None
            return
        self._event, at = event, event.at
        match event:
            case Committed():
                # A step commits in several messages, and one that was repeated after a step back comes again.
                if self.commits and self.commits[-1].step == event.step:
                    self.commits[-1].units += len(event.trained)
                    self.commits[-1].at = at
                else:
                    self.commits.append(Commit(event.step, event.version, at, len(event.trained)))
            case Published():
                self.published.append(Commit(0, event.version, at))
            case Delivered():
                self.delivered[event.unit_id] = at
            case LearnerJoined(hello=hello):
                self.learners.append(Commit(hello.step, hello.epoch, at, lineage=hello.lineage))
                if self._state is not None:
                    self._lose_behind(hello.step)
            case _:
                pass

    def _lose_behind(self, step: int) -> None:
        """Note the released units of steps that a learner has undone: they cannot come again."""
        assert self._state is not None
        before, steps = self._state.lineage, self._state.steps
        event = self._event
        if before is None or not isinstance(event, LearnerJoined) or not steps.goes_back(step):
            return
        hello = event.hello
        again = (before.peer, before.incarnation, before.epoch) == (
            hello.peer,
            hello.incarnation,
            hello.epoch,
        )
        if again or not (before.lineage == hello.lineage or hello.step > 0):
            return
        for unit in steps.behind(step):
            self._told += [("lost", key) for key in self._units.get(unit.unit_id, ())]

    def _settle(self) -> None:
        """Give the segments the outcomes that the last record gave them."""
        event, told = self._event, self._told
        self._event, self._told = None, []
        if not told:
            return
        for outcome, key in told:
            row = self.by_id.get(key[0])
            piece = None if row is None else row.piece(key[1])
            if row is None or piece is None:
                continue
            self.touched.add(row.place)
            piece.outcome = sys.intern(outcome)
            piece.step = event.step if isinstance(event, Committed) and outcome else -1
            piece.lags = ()
            if outcome == "trained" and isinstance(event, Committed) and event.version >= 0:
                assert self._state is not None
                line = self._state.line
                lags = tuple((event.version - line.place(version), n) for version, n in piece.versions)
                piece.lags = self._shared(lags)
        if isinstance(event, Committed):
            self._remember_units(event, [key for _, key in told])

    def _remember_units(self, event: Committed, keys: list[SegmentKey]) -> None:
        of_group: dict[str, list[SegmentKey]] = {}
        for key in keys:
            row = self.by_id.get(key[0])
            for name in (key[0], names.window_id(*key), row.group if row else ""):
                of_group.setdefault(name, []).append(key)
        for unit_id in (*event.trained, *event.dropped):
            found = of_group.get(unit_id.partition("#")[0])
            if found:
                self._units[unit_id] = found
        # The broker itself remembers no more of them.
        while len(self._units) > 20_000:
            del self._units[next(iter(self._units))]

    def _shared(self, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        if len(self._equal) > MAX_EQUAL:
            self._equal.clear()
        return self._equal.setdefault(pairs, pairs)

    # --- sums ---------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[Row, Piece]]:
        """Yield all segments with their trajectories."""
        for row in self.rows:
            for piece in row.pieces:
                yield row, piece

    @property
    def ledger(self) -> Ledger | None:
        """The broker's ledger as it was at the end of the journal; None if the journal does not say."""
        return None if self._state is None else self._state.ledger

    def lag_of(self, version: int, current: int) -> int | None:
        """Return the policy lag of a version behind another one on the newest line; None if that is not known."""
        return None if self._state is None else self._state.line.lag(version, current)


def _versions(segment: Segment, body: bytes) -> tuple[tuple[int, int], ...]:
    """Return the policy versions of a segment, each with its action tokens; none if a teacher wrote it."""
    if not segment.action_tokens or segment.policy:
        return ()
    if segment.version_min == segment.version_max:
        return ((segment.version_min, segment.action_tokens),)
    arrays = unpack_arrays(segment.arrays, body)
    versions: Int32s = arrays["policy_version"][arrays["action_mask"] > 0]
    found, counts = np.unique(versions, return_counts=True)
    return tuple(zip(found.tolist(), counts.tolist(), strict=True))
