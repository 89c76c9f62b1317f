"""What arrives from the broker, turned into groups that can be trained. Pure: messages in, commits out."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from learner.curriculum import Curriculum
from learner.open_trajectories import OpenTrajectories
from learner.trajectory import BrokenTrajectory, Trajectory, assemble
from protocol.codec import Arrays, decode_delivery
from protocol.errors import ProtocolError
from protocol.messages import AnyMessage, Commit, Deliver, Dropped, QueueStats, Segment, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """One delivery: the trajectories of a rollout group, a single one, or a window of one."""

    unit_id: str
    group_id: str
    trajectories: list[Trajectory]


@dataclass
class Counts:
    """What became of everything that arrived, in trajectories and in action tokens."""

    trajectories: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: str, trajectories: Sequence[Trajectory]) -> None:
        if trajectories:
            self.note(outcome, len(trajectories), sum(t.window_tokens for t in trajectories))

    def note(self, outcome: str, trajectories: int, tokens: int = 0) -> None:
        """Count what never became a trajectory here; its tokens, where they reached us at all."""
        if trajectories:
            self.trajectories[outcome] = self.trajectories.get(outcome, 0) + trajectories
        if tokens:
            self.tokens[outcome] = self.tokens.get(outcome, 0) + tokens

    def total(self, *outcomes: str) -> int:
        """Trajectories with one of these outcomes."""
        return sum(self.trajectories.get(outcome, 0) for outcome in outcomes)


def has_signal(trajectories: Sequence[Trajectory]) -> bool:
    """Whether a group-relative advantage can be anything but zero: two members with different returns.

    A greedy member serves as baseline and is no part of the comparison.
    """
    return len({t.return_ for t in trajectories if not t.baseline}) > 1


def newest_version(trajectories: Sequence[Trajectory]) -> int:
    """Version of the freshest token that would be trained."""
    return max(int(t.policy_version[t.window_start :].max(initial=-1)) for t in trajectories)


@dataclass
class Inlet:
    """Groups ready to be trained, evaluation results, and the commits still owed to the broker."""

    curriculum: Curriculum
    filter_uniform: bool
    windows: bool = False
    """Whether deliveries are segments, each of which is trained as it comes."""
    rescuable: Callable[[Sequence[Trajectory]], bool] = field(default=lambda _: False)
    """Whether a group without signal is wanted all the same."""
    open: OpenTrajectories = field(default_factory=OpenTrajectories)
    ready: deque[Group] = field(default_factory=deque)
    evaluated: dict[str, Trajectory | None] = field(default_factory=dict)
    """By group id; None where the broker has given the task up."""
    counts: Counts = field(default_factory=Counts)
    gauges: dict[str, float] = field(default_factory=dict)
    deliveries: int = 0
    recent: list[Trajectory] = field(default_factory=list)
    """Training trajectories that arrived since `take_recent` was last called, whatever became of them."""
    _leases: dict[str, str] = field(default_factory=dict)
    """Lease under which each unit that is ready, or being trained, is held now."""
    _dropped: list[str] = field(default_factory=list)

    def received(self, message: AnyMessage, rest: Sequence[bytes]) -> None:
        """Take in one message."""
        match message:
            case Deliver(unit_id=unit_id) if unit_id in self._leases:
                self._leases[unit_id] = message.lease_id  # we hold it: a new lease, not new data
            case Deliver():
                self.deliveries += 1
                self._delivered(message, rest)
            case Dropped():
                self.deliveries += 1
                if message.trajectories:  # a piece in the middle shows as a gap, when the next one comes
                    self._will_not_come(message.group_id, message.unit_id)
                self.counts.note(f"dropped_{message.reason}", message.trajectories)
            case QueueStats():
                self.gauges = message.gauges

    def take(self, groups: int, *, in_order: bool = False) -> list[Group]:
        """The oldest groups: by arrival, or in the order they were dealt out."""
        if in_order:
            order = sorted(self.ready, key=lambda group: Curriculum.index_of(group.group_id))
            self.ready = deque(order)
        return [self.ready.popleft() for _ in range(min(groups, len(self.ready)))]

    def drop_stale(self, oldest: int) -> None:
        """Let go of groups without a single token of version ``oldest`` or later: they would train nothing."""
        for group in [g for g in self.ready if newest_version(g.trajectories) < oldest]:
            self.ready.remove(group)
            self._settle(group)
            self._dropped.append(self._leases.pop(group.unit_id))
            self.counts.add("stale", group.trajectories)

    def take_recent(self) -> list[Trajectory]:
        """Training trajectories that arrived since the last call."""
        recent, self.recent = self.recent, []
        return recent

    def commit(
        self, epoch: int, step: int, trained: Sequence[Group], replayed_tokens: int = 0
    ) -> Commit | None:
        """What to tell the broker: these groups are trained, and those were dropped since the last time."""
        for group in trained:
            self._settle(group)
        dropped, self._dropped = self._dropped, []
        if not trained and not dropped:
            return None
        leases = [self._leases.pop(group.unit_id) for group in trained]
        return Commit(
            epoch=epoch, step=step, trained=leases, dropped=dropped, replayed_tokens=replayed_tokens
        )

    @property
    def backlog(self) -> int:
        """Windows that wait and are not the last of their trajectory; for that one it still has its room."""
        return sum(group.trajectories[0].status == "unfinished" for group in self.ready)

    def awaited(self) -> list[Task]:
        """Tasks that are out and whose end is not here: a broker that was restarted has to be told of them."""
        here = {unit_id.rpartition(".")[0] for unit_id in self._leases if "/" not in unit_id}
        return [
            task
            for group_id, tasks in self.curriculum.outstanding.items()
            if group_id not in self._leases
            for task in tasks
            if task.task_id not in here and not self.open.ended(task.task_id)
        ]

    def _delivered(self, deliver: Deliver, rest: Sequence[bytes]) -> None:
        try:
            segments = decode_delivery(deliver, rest)
        except ProtocolError as error:
            log.error("delivery refused unit=%s: %s", deliver.unit_id, error)
            segments = []
        if self.windows and segments and segments[0][0].purpose == "train":
            self._window(deliver, segments)
            return
        trajectories = self._assemble(segments)
        if not trajectories:
            group_id = segments[0][0].group_id if segments else deliver.unit_id.partition(".")[0]
            if deliver.complete or deliver.unit_id == group_id:
                self._will_not_come(group_id, deliver.unit_id)
            self._drop("unusable", deliver, [])
            return
        group_id = trajectories[0].group_id
        if trajectories[0].purpose == "eval":
            for trajectory in trajectories:
                self.evaluated[group_id] = trajectory
            self._drop("evaluated", deliver, trajectories)
            return
        if not self.curriculum.owns(group_id):
            self._drop("other_epoch", deliver, trajectories)
            return
        self.recent += trajectories
        failed = [t for t in trajectories if t.status == "failed"]
        self.counts.add("failed", failed)
        usable = [t for t in trajectories if t.status != "failed" and t.action_tokens]
        outcome = self._fault(usable)
        if outcome:
            self._settle(Group(deliver.unit_id, group_id, trajectories))
            self._drop(outcome, deliver, usable)
            return
        self._leases[deliver.unit_id] = deliver.lease_id
        self.ready.append(Group(deliver.unit_id, group_id, usable))

    def _fault(self, usable: Sequence[Trajectory]) -> str:
        """Why a group would train nothing; empty if it would train something."""
        config = self.curriculum.config
        baselines = sum(t.baseline for t in usable)
        if baselines == len(usable) or (config.group_members > config.group_size and not baselines):
            return "unusable"  # nothing to be trained, or nothing to compare it with
        if self.filter_uniform and not has_signal(usable) and not self.rescuable(usable):
            return "uniform"
        return ""

    def _window(self, deliver: Deliver, segments: list[tuple[Segment, Arrays]]) -> None:
        """The next segment of a trajectory that may still be growing: train on it, with all before as context."""
        segment, last = segments[0][0], segments[-1][0]
        tokens = sum(piece.action_tokens for piece, _ in segments)
        if not self.curriculum.awaits(segment.group_id, segment.task_id):
            self.counts.note("other_epoch", 0, tokens)
            self._drop("other_epoch", deliver, [])
            return
        if self.open.displaced_by(segments):
            self.counts.note("broken", 1)
        try:
            trajectory = self.open.extend(segments)
        except BrokenTrajectory as error:
            log.error("window rejected: %s", error)
            self.counts.note("broken", 1)
            trajectory = None
        if trajectory is None:
            self.counts.note("broken", 0, tokens)
            self._drop("broken", deliver, [])
            if last.status != "unfinished":
                self._settle_member(segment.group_id, segment.task_id)
            return
        if trajectory.status != "unfinished":
            self.recent.append(trajectory)
        group = Group(deliver.unit_id, segment.group_id, [trajectory])
        if trajectory.status == "failed" or not trajectory.window_tokens:
            self._settle(group)
            self._drop("failed" if trajectory.status == "failed" else "context", deliver, [trajectory])
            return
        self._leases[deliver.unit_id] = deliver.lease_id
        self.ready.append(group)

    def _settle(self, group: Group) -> None:
        """Its room is free again; that of an unfinished trajectory only when its last window is done with."""
        if group.unit_id == group.group_id:
            self.curriculum.settle(group.group_id)
            return
        for trajectory in group.trajectories:
            if trajectory.status != "unfinished":
                self._settle_member(group.group_id, trajectory.trajectory_id.rpartition(".")[0])

    def _settle_member(self, group_id: str, task_id: str) -> None:
        self.open.forget(task_id)
        self.curriculum.settle_member(group_id, task_id)

    def _will_not_come(self, group_id: str, unit_id: str) -> None:
        """Wait for this group, or this member of it, no more."""
        if self.curriculum.is_evaluation(group_id):
            self.evaluated[group_id] = None
            return
        if unit_id in ("", group_id):
            for task in self.curriculum.outstanding.get(group_id, []):
                self.open.forget(task.task_id)
            self.curriculum.settle(group_id)
            return
        name = unit_id.partition("/")[0]  # of the task, or of its trajectory
        task_id = name if self.curriculum.awaits(group_id, name) else name.rpartition(".")[0]
        self._settle_member(group_id, task_id)

    def _assemble(self, segments: list[tuple[Segment, Arrays]]) -> list[Trajectory]:
        """The unit's trajectories; one that cannot be put together is counted and left out, not its group."""
        by_id: dict[str, list[tuple[Segment, Arrays]]] = {}
        for segment, arrays in segments:
            by_id.setdefault(segment.trajectory_id, []).append((segment, arrays))
        trajectories = []
        for pieces in by_id.values():
            try:
                trajectories.append(assemble(pieces))
            except BrokenTrajectory as error:
                log.error("trajectory rejected: %s", error)
                self.counts.note("rejected", 1)
        return trajectories

    def _drop(self, outcome: str, deliver: Deliver, trajectories: Sequence[Trajectory]) -> None:
        self.counts.add(outcome, trajectories)
        self._dropped.append(deliver.lease_id)
