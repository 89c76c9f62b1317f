"""What the broker keeps of tasks, segments, trajectories, groups and units: plain records, as the journal has them."""

from typing import Literal

from msgspec import Struct, field

from protocol import names
from protocol.codec import MAX_FRAMES, MAX_MESSAGE_BYTES
from protocol.messages import Purpose, Task
from protocol.names import SegmentKey

ENVELOPE_BYTES = 64 * 1024

Outcome = Literal[
    "trained", "dropped", "stale", "superseded", "late", "given_up", "too_large", "poison", "damaged"
]


class StoredSegment(Struct, frozen=True, array_like=True):
    """One stored segment, as far as the broker needs to know it."""

    key: SegmentKey
    tokens: int
    action_tokens: int
    version_max: int
    nbytes: int


class TaskLease(Struct):
    """A task in the hands of an actor; ``renewed`` moves with progress, ``limit`` is the latest end."""

    lease_id: str
    actor: str
    incarnation: int
    renewed: float
    limit: float


class TaskRecord(Struct):
    """A task that is queued (no lease) or being run."""

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
    """A trajectory as it arrives. ``segments`` are those not yet part of a unit; snapshots call them pieces."""

    trajectory_id: str
    task: Task
    segments: list[StoredSegment] = field(name="pieces", default_factory=list)
    next_index: int = 0
    tokens: int = 0
    action_tokens: int = 0
    closed: bool = False
    failed: bool = False
    split: bool = False
    """Whether a part of it is delivered already; then the rest follows segment by segment."""

    @property
    def length(self) -> int:
        """Action tokens, once it has ended well; 0 before."""
        return self.action_tokens if self.closed and not self.failed else 0


class GroupRecord(Struct):
    """A rollout group: members still out, members here, and how many others there were."""

    group_id: str
    size: int
    out: set[str] = set()
    here: list[TrajectoryRecord] = []
    taken: int = 0
    lost: int = 0
    since: float | None = None
    """When the first member was closed or lost."""

    @property
    def members_done(self) -> int:
        return len(self.here) + self.taken + self.lost


class Unit(Struct):
    """What is handed to the learner in one delivery."""

    unit_id: str
    group_id: str
    purpose: Purpose
    segments: list[StoredSegment] = field(name="pieces")
    trajectories: int
    complete: bool
    context: bool = False
    """Whether pieces that follow are of no use without it."""
    lengths: list[int] = []
    """Action tokens of the trajectories that end in it."""
    age: int = 0
    """Order in which units became ready."""
    deliveries: int = 0
    epoch: int = 0
    """Of the learner it was delivered to last."""
    processes: int = 0
    """Learner processes it was delivered to since the last checkpoint."""
    held: bool = False
    """Whether the learner alive may have it, from whatever delivery."""
    step: int = 0
    """Of its commit, with `outcome`."""
    outcome: Outcome | None = None

    @property
    def version_max(self) -> int:
        return max((stored.version_max for stored in self.segments), default=-1)

    @property
    def fits(self) -> bool:
        """Whether it fits into one message."""
        nbytes = sum(stored.nbytes for stored in self.segments)
        return nbytes + ENVELOPE_BYTES <= MAX_MESSAGE_BYTES and 2 * len(self.segments) + 2 <= MAX_FRAMES
