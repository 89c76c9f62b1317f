"""Records of the broker: tasks and units, the events that change them, their stores, and the ledger.

Stores keep segments and events in memory, or in a journal that outlives it (`broker.output_commit.JournalStore`). The
ledger has the outcome of every segment and token that reached the broker.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import msgspec
from msgspec import Struct, field

from protocol import names
from protocol.codec import MAX_FRAMES, MAX_MESSAGE_BYTES, Buffer, decode_payload
from protocol.messages.episodes import Task
from protocol.messages.fields import Purpose
from protocol.messages.peers import Hello
from protocol.names import SegmentKey

ENVELOPE_BYTES = 64 * 1024

Outcome = Literal[
    "trained", "dropped", "stale", "superseded", "late", "given_up", "too_large", "poison", "damaged", "lost"
]


class StoredSegment(Struct, frozen=True, array_like=True):
    """One stored segment: the facts about it that the broker needs."""

    key: SegmentKey
    tokens: int
    action_tokens: int
    version_max: int
    nbytes: int


class TaskLease(Struct):
    """Lease of a task by an actor; ``renewed`` moves with progress, ``limit`` is the latest end."""

    lease_id: str
    actor: str
    incarnation: int
    renewed: float
    limit: float


class TaskRecord(Struct):
    """A task that is queued (no lease) or leased."""

    task: Task
    attempt: int = 0
    losses: int = 0
    lease: TaskLease | None = None
    avoid: str = ""
    retry_at: float = 0.0

    @property
    def trajectory_id(self) -> str:
        return names.trajectory_id(self.task.task_id, self.attempt)


class TrajectoryRecord(Struct):
    """A trajectory whose segments arrive. ``segments`` are not yet in a unit; snapshots call them pieces."""

    trajectory_id: str
    task: Task
    """The trajectory's task, without its data."""
    segments: list[StoredSegment] = field(name="pieces", default_factory=list)
    next_index: int = 0
    tokens: int = 0
    action_tokens: int = 0
    closed: bool = False
    failed: bool = False
    split: bool = False
    """True if a part of the trajectory is in units already; the rest then follows segment by segment."""

    @property
    def length(self) -> int:
        """Action tokens of the trajectory, once it has ended well; otherwise 0."""
        return self.action_tokens if self.closed and not self.failed else 0


class GroupRecord(Struct):
    """A rollout group: tasks still ``out``, closed members ``here``.

    ``taken`` counts the members delivered singly, ``lost`` the members given up.
    """

    group_id: str
    size: int
    out: set[str] = set()
    here: list[TrajectoryRecord] = []
    taken: int = 0
    lost: int = 0
    since: float | None = None
    """Time when the first member was closed or lost; None before."""

    @property
    def members_done(self) -> int:
        return len(self.here) + self.taken + self.lost


class Unit(Struct):
    """Segments that the broker hands to the learner in one delivery."""

    unit_id: str
    group_id: str
    purpose: Purpose
    segments: list[StoredSegment] = field(name="pieces")
    trajectories: int
    complete: bool
    context: bool = False
    """True if later segments of the trajectory are of no use without this unit."""
    lengths: list[int] = []
    """Action tokens of each trajectory that ends in the unit."""
    age: int = 0
    """Position of the unit in the order in which units became ready."""
    deliveries: int = 0
    epoch: int = 0
    """Epoch of the learner that the unit was delivered to last."""
    processes: int = 0
    """Number of learner processes that the unit was delivered to since the last checkpoint."""
    held: bool = False
    """True if the live learner may still have the unit from an earlier delivery."""
    step: int = 0
    """Learner step of the commit, set together with `outcome`."""
    outcome: Outcome | None = None

    @property
    def version_max(self) -> int:
        return max((stored.version_max for stored in self.segments), default=-1)

    @property
    def fits(self) -> bool:
        """Whether the unit fits into one message."""
        nbytes = sum(stored.nbytes for stored in self.segments)
        return nbytes + ENVELOPE_BYTES <= MAX_MESSAGE_BYTES and 2 * len(self.segments) + 2 <= MAX_FRAMES


class Event(Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events."""

    at: float | None = None
    """Wall clock at which the journal took the event, in seconds since 1970 (UTC); None in a journal of an earlier
    version. For people: the state never reads it, because a clock may be set while the broker runs."""


class TasksPut(Event, tag="tasks_put", frozen=True):
    """The learner put new tasks; their rollout groups wait for them."""

    tasks: list[Task]


class Leased(Event, tag="leased", frozen=True):
    """A task was leased to an actor (process ``incarnation`` of that name)."""

    task_id: str
    lease_id: str
    actor: str
    incarnation: int = 0


class LeaseEnded(Event, tag="lease_ended", frozen=True):
    """An attempt ended early.

    ``fault``: it counts towards max_attempts. ``avoid``: the actor that rejected the task.
    """

    task_id: str
    fault: bool = True
    avoid: str = ""


class GroupClosed(Event, tag="group_closed", frozen=True):
    """The deadline of a rollout group has passed."""

    group_id: str


class Delivered(Event, tag="delivered", frozen=True):
    """A unit was sent to the learner of this epoch."""

    unit_id: str
    epoch: int


class UnitDropped(Event, tag="unit_dropped", frozen=True):
    """A ready unit will not be delivered."""

    unit_id: str
    outcome: Literal["stale", "poison", "damaged"]


class Committed(Event, tag="committed", frozen=True):
    """The learner committed units: ``trained`` entered the gradient of ``step``, in this order."""

    epoch: int
    step: int
    trained: list[str] = []
    dropped: list[str] = []
    replayed_tokens: int = 0
    version: int = -1
    """Version that the step updated; -1 where nothing was trained."""


class Released(Event, tag="released", frozen=True):
    """A checkpoint covers the commits up to ``step``, so the learner will not ask for these units again."""

    epoch: int
    step: int


class LearnerJoined(Event, tag="learner_joined", frozen=True):
    """A learner process took over, or wants another kind of unit than before."""

    hello: Hello


class Published(Event, tag="published", frozen=True):
    """A policy version was announced."""

    epoch: int
    version: int
    manifest: str
    url: str = ""
    root: str = ""
    line: list[tuple[int, int]] = []


AnyEvent = (
    TasksPut | Leased | LeaseEnded | GroupClosed | Delivered | UnitDropped | Committed | Released | LearnerJoined
    | Published
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


def encode_event(event: AnyEvent, at: float | None = None) -> bytes:
    """Encode an event for the journal.

    Args:
        at: wall clock, in seconds since 1970 (UTC); None: nobody knows.

    Example:
        >>> decode_event(encode_event(GroupClosed(group_id="1g7"), 1.5))
        GroupClosed(group_id='1g7', at=1.5)
    """
    return _encoder.encode(event if at is None else msgspec.structs.replace(event, at=at))


def decode_event(payload: bytes) -> AnyEvent:
    """Decode an event of the journal.

    Raises:
        msgspec.MsgspecError: the payload is no event.
    """
    return decode_payload(_decoder, payload)


class SegmentStore(Protocol):
    """Raw header and body bytes by key. They are never decoded or changed, so that unknown fields survive.

    A segment is held until the learner commits it. A committed segment is kept until a checkpoint covers its
    commit. Only held segments count towards the broker's limits.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of held segments."""
        ...

    @property
    def committed_nbytes(self) -> int:
        """Bytes of committed segments that no checkpoint covers yet."""
        ...

    @property
    def low(self) -> bool:
        """Whether there is no room for more segments."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether committed segments take the room of waiting ones."""
        ...

    def __len__(self) -> int:
        """Return the number of held segments."""
        ...

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None: ...
    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]: ...
    def commit(self, key: SegmentKey) -> None: ...
    def uncommit(self, key: SegmentKey) -> None: ...
    def drop(self, key: SegmentKey) -> None: ...

    def record_event(self, event: AnyEvent) -> None:
        """Record an event, in order with the segments."""
        ...


class Counted:
    """Numbers of bytes and segments that are held or committed."""

    def __init__(self) -> None:
        self._held: dict[SegmentKey, int] = {}
        self._committed: dict[SegmentKey, int] = {}
        self.nbytes = self.committed_nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: SegmentKey, nbytes: int) -> None:
        known = key in self._held or key in self._committed
        assert not known, f"segment {key} is stored already"
        self._held[key] = nbytes
        self.nbytes += nbytes

    def commit(self, key: SegmentKey) -> None:
        nbytes = self._committed[key] = self._held.pop(key)
        self.nbytes -= nbytes
        self.committed_nbytes += nbytes

    def uncommit(self, key: SegmentKey) -> None:
        nbytes = self._held[key] = self._committed.pop(key)
        self.nbytes += nbytes
        self.committed_nbytes -= nbytes

    def drop(self, key: SegmentKey) -> None:
        if key in self._held:
            self.nbytes -= self._held.pop(key)
        else:
            self.committed_nbytes -= self._committed.pop(key)


class MemoryStore(Counted):
    """Segments in memory, which are lost with the process.

    Example:
        >>> store = MemoryStore()
        >>> store.put(("t.0", 0), b"header", b"body")
        >>> store.nbytes, len(store), store.get(("t.0", 0))
        (10, 1, (b'header', b'body'))
        >>> store.commit(("t.0", 0)); store.nbytes, store.committed_nbytes
        (0, 10)
        >>> store.drop(("t.0", 0)); store.committed_nbytes
        0
    """

    low = False
    crowded = False

    def __init__(self) -> None:
        super().__init__()
        self._frames: dict[SegmentKey, tuple[bytes, Buffer]] = {}

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None:
        self.add(key, len(header) + len(body))
        self._frames[key] = (header, body)

    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]:
        return self._frames[key]

    def drop(self, key: SegmentKey) -> None:
        super().drop(key)
        del self._frames[key]

    def record_event(self, event: AnyEvent) -> None:
        pass


OUTCOMES: dict[Outcome, str] = {
    "trained": "tokens that entered a gradient",
    "dropped": "tokens that the learner filtered out or evaluated",
    "stale": "tokens of units that were older than max_policy_lag when their delivery was due",
    "superseded": "tokens of attempts that were lost before their end, or of lineages that have ended",
    "late": "tokens of trajectories that were open when their group's deadline passed",
    "given_up": "tokens of groups of which too few members ended",
    "too_large": "tokens of units that do not fit into one message",
    "damaged": "tokens of units whose bytes in the journal cannot be read any more",
    "poison": "tokens of units that several learner processes in a row did not survive",
    "lost": "tokens of units that were trained or dropped in steps that a learner undid after their release",
}
"""Meaning of each outcome of a token."""


@dataclass
class Tally:
    """Segments and their tokens, counted together."""

    segments: int = 0
    tokens: int = 0
    action_tokens: int = 0

    def add(self, stored: StoredSegment) -> None:
        self.segments += 1
        self.tokens += stored.tokens
        self.action_tokens += stored.action_tokens

    def add_all(self, segments: Sequence[StoredSegment]) -> None:
        for stored in segments:
            self.tokens += stored.tokens
            self.action_tokens += stored.action_tokens
        self.segments += len(segments)

    def move(self, other: "Tally", *, segments: int, tokens: int, action_tokens: int) -> None:
        """Move segments and tokens to another tally."""
        for tally, sign in ((self, -1), (other, 1)):
            tally.segments += sign * segments
            tally.tokens += sign * tokens
            tally.action_tokens += sign * action_tokens

    def remove(self, stored: StoredSegment) -> None:
        self.segments -= 1
        self.tokens -= stored.tokens
        self.action_tokens -= stored.action_tokens


@dataclass
class Lengths:
    """Lengths of closed training trajectories, in action tokens: of all, and of those that were trained.

    Trajectories that are dropped as stale, filtered or given up are seldom a random sample. If mostly long
    answers are dropped, the policy learns to be short. Lengths from 1,000 on are rounded to three digits, so
    that there are never many different ones.

    Example:
        >>> lengths = Lengths()
        >>> for tokens in (10, 10, 20, 40): lengths.closed(tokens)
        >>> for tokens in (10, 10): lengths.trained(tokens)
        >>> lengths.bias_tokens, lengths.distance_tokens
        (-10.0, 10.0)
        >>> lengths.trained(10, -1); lengths.trained(20); lengths.trained(40); lengths.trained(10)
        >>> lengths.bias_tokens, lengths.distance_tokens
        (0.0, 0.0)
    """

    all: dict[int, int] = dataclasses.field(default_factory=dict)
    of_trained: dict[int, int] = dataclasses.field(default_factory=dict)

    def closed(self, tokens: int) -> None:
        """Count a trajectory that has ended."""
        _count(self.all, tokens, 1)

    def trained(self, tokens: int, times: int = 1) -> None:
        """Count a trajectory that entered a gradient with its last window; ``times`` = -1 undoes that."""
        _count(self.of_trained, tokens, times)

    @property
    def bias_tokens(self) -> float:
        """Mean length of trained trajectories minus mean of all, in tokens. Below 0: long ones are lost."""
        if not self.of_trained:
            return 0.0
        return _mean(self.of_trained) - _mean(self.all)

    @property
    def distance_tokens(self) -> float:
        """Wasserstein-1 distance between the two distributions of lengths, in tokens."""
        if not self.of_trained:
            return 0.0
        total, trained = sum(self.all.values()), sum(self.of_trained.values())
        distance, gap, before = 0.0, 0.0, 0
        for tokens in sorted(self.all.keys() | self.of_trained.keys()):
            distance += abs(gap) * (tokens - before)
            gap += self.all.get(tokens, 0) / total - self.of_trained.get(tokens, 0) / trained
            before = tokens
        return distance


def _count(counts: dict[int, int], tokens: int, times: int) -> None:
    key = tokens if tokens < 1000 else _three_digits(tokens)
    counts[key] = counts.get(key, 0) + times
    if times < 0 and not counts[key]:
        del counts[key]


@lru_cache(maxsize=4_096)
def _three_digits(tokens: int) -> int:
    return int(float(f"{tokens:.3g}"))


def _mean(counts: dict[int, int]) -> float:
    return sum(tokens * count for tokens, count in counts.items()) / sum(counts.values())


@dataclass
class Ledger:
    """Sums that must close: every stored segment is held or has exactly one outcome.

    Example:
        >>> ledger = Ledger()
        >>> ledger.stored.add(StoredSegment(("t.0", 0), 5, 2, 1, 100))
        >>> ledger.held_tokens
        5
        >>> ledger.note_outcome("trained", StoredSegment(("t.0", 0), 5, 2, 1, 100)); ledger.held_tokens
        0
    """

    stored: Tally = dataclasses.field(default_factory=Tally)
    delivered: Tally = dataclasses.field(default_factory=Tally)
    redelivered: Tally = dataclasses.field(default_factory=Tally)
    rolled_back: Tally = dataclasses.field(default_factory=Tally)
    """Segments whose commit was undone, because the learner's checkpoint was older; outside the sums."""
    outcomes: dict[Outcome, Tally] = dataclasses.field(
        default_factory=lambda: {name: Tally() for name in OUTCOMES}
    )
    undone: dict[Outcome, int] = dataclasses.field(default_factory=dict)
    """Tokens whose outcome was undone or became "lost", by the former outcome; outside the sums."""
    replayed_tokens: int = 0
    """Action tokens trained again after they were committed as trained; outside the sums."""
    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    duplicate_segments: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    tasks: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def held_tokens(self) -> int:
        """Tokens that should be held now, according to the sums."""
        return self.stored.tokens - sum(tally.tokens for tally in self.outcomes.values())

    @property
    def held_segments(self) -> int:
        """Segments that should be held now, according to the sums."""
        return self.stored.segments - sum(tally.segments for tally in self.outcomes.values())

    def note_outcome(self, outcome: Outcome, *segments: StoredSegment) -> None:
        """Count the outcome of these segments."""
        self.outcomes[outcome].add_all(segments)

    def undo_outcome(self, outcome: Outcome, stored: StoredSegment) -> None:
        """Undo the outcome of a segment, because the step that had it is not part of the lineage any more."""
        self.outcomes[outcome].remove(stored)
        self.rolled_back.add(stored)
        self.note_undone(outcome, stored.tokens)

    def note_undone(self, outcome: Outcome, tokens: int) -> None:
        """Count tokens that have this outcome no more."""
        self.undone[outcome] = self.undone.get(outcome, 0) + tokens

    def counted_tokens(self, outcome: Outcome) -> int:
        """Return how many tokens have got this outcome so far, undone ones included. It never falls.

        Example:
            >>> ledger, stored = Ledger(), StoredSegment(("t.0", 0), 5, 2, 1, 100)
            >>> ledger.note_outcome("trained", stored); ledger.undo_outcome("trained", stored)
            >>> ledger.counted_tokens("trained"), ledger.outcomes["trained"].tokens
            (5, 0)
        """
        return self.outcomes[outcome].tokens + self.undone.get(outcome, 0)

    def difference(self, segments: Iterable[StoredSegment]) -> str:
        """Return how the tokens of the held segments differ from the sums, or ""."""
        tokens = sum(stored.tokens for stored in segments)
        if tokens == self.held_tokens:
            return ""
        outcomes = {name: tally.tokens for name, tally in self.outcomes.items() if tally.tokens}
        return (
            f"{tokens} tokens are held, but {self.stored.tokens} were stored and {outcomes} have an outcome, "
            f"which leaves {self.held_tokens}: {tokens - self.held_tokens:+d}"
        )

    def miscount(self, held: int) -> str:
        """Return how the number of held segments differs from the sums, or ""."""
        wanted = self.held_segments
        return "" if held == wanted else f"{held} segments are held, the sums leave {wanted}"

    def refuse(self, code: str) -> None:
        """Count a refusal by its code."""
        self.refused[code] = self.refused.get(code, 0) + 1

    def task(self, event: str, count: int = 1) -> None:
        """Count an event: a task was put, leased, lost, given_up, closed or cancelled, or a peer was lost."""
        self.tasks[event] = self.tasks.get(event, 0) + count
