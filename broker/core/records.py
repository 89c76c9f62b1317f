"""Plain records that the broker and its journal keep of tasks, segments, trajectories, groups and units."""

from typing import Literal

from msgspec import Struct, field

from protocol import names
from protocol.codec import MAX_FRAMES, MAX_MESSAGE_BYTES
from protocol.messages.fields import Purpose
from protocol.messages.tasks import Task
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
