"""Turns deliveries of the broker into units that can be trained. Pure: messages in, commits out."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from learner.credit.reward_config import RewardConfig
from learner.credit.rewards import as_given, composed, updates_at
from learner.credit.signal import has_signal
from learner.errors import BrokenTrajectory
from learner.families.family import FamilyStage
from learner.families.waiting import WaitingFamilies
from learner.intake.curriculum import Curriculum
from learner.intake.open_trajectories import OpenTrajectories
from learner.intake.signal_watch import SignalWatch
from learner.intake.token_audit import check_ledger
from learner.intake.unit_commits import UnitCommits
from learner.trajectory import Trajectory, assemble
from learner.units import RECOMMITTED, Counts, Unit, newest_version
from protocol import names
from protocol.arrays import SegmentArrays
from protocol.codec import decode_delivery
from protocol.errors import ProtocolError
from protocol.messages import AnyMessage, Commit, Deliver, Dropped, QueueStats, Task
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)

SAMPLED = "generator/tokens_total"
"""Gauge of the broker: action tokens that the generators have sampled."""


@dataclass
class Intake:
    """Units ready to be trained, evaluation results, and commits that are still to be sent."""

    curriculum: Curriculum
    filter_uniform: bool
    """True if groups without a signal are dropped."""
    windows: bool = False
    """True if units are windows: segments that are trained as they come."""
    rescuable: Callable[[Sequence[Trajectory]], bool] = field(default=lambda _: False)
    """Function that returns whether replay can use a group without a signal, so that it is kept."""
    families: WaitingFamilies | None = None
    """Groups that wait for others of their family; None: each group is trained by itself."""
    line: VersionLine = field(default_factory=VersionLine)
    """Line of versions by which the lag of tokens from undone steps is counted: see `_placed`."""
    open: OpenTrajectories = field(default_factory=OpenTrajectories)
    ready: deque[Unit] = field(default_factory=deque)
    """Units that wait to be trained, in the order of arrival."""
    evaluated: dict[str, Trajectory | None] = field(default_factory=dict)
    """Results of evaluation tasks by group id; None if the broker gave the task up."""
    counts: Counts = field(default_factory=Counts)
    gauges: dict[str, float] = field(default_factory=dict)
    """Newest gauges that the broker sent."""
    deliveries: int = 0
    """Deliver and Dropped messages received so far."""
    recent: list[Trajectory] = field(default_factory=list)
    """Training trajectories that arrived since the last `take_recent`, dropped ones included."""
    signal: SignalWatch = field(default_factory=SignalWatch)
    """Counts of episodes that fail and of groups with equal returns."""
    commits: UnitCommits = field(default_factory=UnitCommits)
    """Deliveries that are here and not committed yet, and those that were committed."""
    delivered_tokens: int = 0
    """Action tokens of all delivered units; a unit that came again while it was here counts once."""
    trained_tokens: int = 0
    """Action tokens of units that were in a batch."""
    sampled_tokens: int = 0
    """Action tokens that the generators report, summed over restarts of this process and of generators."""

    def received(self, message: AnyMessage, rest: Sequence[bytes]) -> None:
        """Process one message from the broker."""
        match message:
            case Deliver(unit_id=unit_id) if unit_id in self.commits:
                # Its commit is not sent yet, so there is nothing to repeat.
                log.debug("unit %s came again while it is here", unit_id)
            case Deliver():
                self.deliveries += 1
                self._delivered(message, rest)
            case Dropped():
                self.deliveries += 1
                # 0 trajectories: a window before the last. The gap shows when the next window comes.
                if message.trajectories:
                    self._will_not_come(message.group_id, message.unit_id)
                self.counts.note(f"dropped_{message.reason}", message.trajectories)
            case QueueStats():
                grown = message.gauges.get(SAMPLED, 0.0) - self.gauges.get(SAMPLED, 0.0)
                # The gauge falls when a generator is restarted.
                self.sampled_tokens += max(0, int(grown))
                self.gauges = message.gauges

    def take(self, units: int, *, in_order: bool = False) -> list[Unit]:
        """Remove and return the oldest units.

        Args:
            units: how many, at most.
            in_order: the order is that in which their tasks were dealt out, instead of that of arrival.
        """
        if in_order:
            order = sorted(self.ready, key=lambda unit: names.group_index(unit.group_id))
            self.ready = deque(order)
        return [self.ready.popleft() for _ in range(min(units, len(self.ready)))]

    def drop_stale(self, oldest: int) -> None:
        """Drop ready units without a token of version ``oldest`` or later: they would train nothing."""
        self.drop([g for g in self.ready if newest_version(g.trajectories) < oldest], "stale")

    def drop(self, units: Sequence[Unit], outcome: str) -> None:
        """Drop ready units and count them under an outcome."""
        for unit in units:
            self.ready.remove(unit)
            self._let_go(unit, outcome)

    def take_recent(self) -> list[Trajectory]:
        """Return the training trajectories that arrived since the last call."""
        recent, self.recent = self.recent, []
        return recent

    def commit(
        self, epoch: int, step: int, trained: Sequence[Unit], replayed_tokens: int = 0, version: int = -1
    ) -> Commit | None:
        """Count units as trained, free their room, and return what `UnitCommits.commit` returns."""
        for unit in trained:
            self._free_room(unit)
            for part in unit.parts:
                self.trained_tokens += part.trained_tokens
                for outcome, trajectories in part.dropped.items():
                    self.counts.add(outcome, trajectories)
        return self.commits.commit(epoch, step, trained, replayed_tokens, version)

    def check(self) -> None:
        """Check between two steps that every delivered action token is counted in exactly one place.

        Raises:
            LedgerViolation: a token was lost or counted twice.
        """
        check_ledger(
            delivered=self.delivered_tokens,
            trained=self.trained_tokens,
            outcomes=self.counts.tokens,
            ready=sum(unit.tokens for unit in self.ready),
            kept=0 if self.families is None else self.families.tokens,
        )

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; ready units are left out, the broker delivers them again."""
        return {
            "counts": asdict(self.counts),
            "committed": self.commits.committed.state(),
            "trained_tokens": self.trained_tokens,
            "sampled_tokens": self.sampled_tokens,
            "sampled_gauge": self.gauges.get(SAMPLED, 0.0),
            "forks": list(self.line.forks),
            "signal": self.signal.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.counts = Counts(**state["counts"])
        self.commits.committed.restore(state["committed"])
        self.trained_tokens, self.sampled_tokens = state["trained_tokens"], state["sampled_tokens"]
        self.delivered_tokens = self.trained_tokens + sum(self.counts.tokens.values())
        self.gauges = {SAMPLED: state["sampled_gauge"]}
        self.line = VersionLine(map(tuple, state.get("forks", ())))
        if "signal" in state:
            self.signal.restore(state["signal"])
        elif self.trained_tokens:
            # An earlier version kept no counts, but what it trained was neither failed nor without a signal.
            self.signal.failed.ever_broken = self.signal.uniform.ever_broken = True

    @property
    def backlog(self) -> int:
        """Number of waiting windows that are not the last of their trajectory.

        A last window is not counted, because its trajectory still takes up room in the curriculum.
        """
        return sum(unit.trajectories[0].status == "unfinished" for unit in self.ready)

    def awaited(self) -> list[Task]:
        """Return outstanding tasks whose result is not here; they are put again after a new join."""
        here = {names.task_of(unit_id) for unit_id in self.commits.held if names.window(unit_id) is None}
        return [
            task
            for group_id, tasks in self.curriculum.outstanding.items()
            if group_id not in self.commits.held
            for task in tasks
            if task.task_id not in here and not self.open.ended(task.task_id)
        ]

    def _delivered(self, deliver: Deliver, rest: Sequence[bytes]) -> None:
        try:
            segments = decode_delivery(deliver, rest)
        except ProtocolError as error:
            log.error("delivery refused unit=%s: %s", deliver.unit_id, error)
            segments = []
        self.delivered_tokens += sum(segment.action_tokens for segment, _ in segments)
        if self._is_committed(deliver.unit_id, segments):
            self._commit_again(deliver, segments)
            return
        if self.windows and segments and segments[0][0].purpose == "train":
            self._window(deliver, segments)
            return
        trajectories = self._assemble(segments)
        if not trajectories:
            group_id = _group_id(deliver, segments)
            if deliver.complete or deliver.unit_id == group_id:
                self._will_not_come(group_id, deliver.unit_id)
            self._drop("unusable", deliver, [])
            return
        group_id = trajectories[0].group_id
        training = trajectories[0].purpose == "train"
        trajectories = self._valued(trajectories, group=deliver.unit_id == group_id, training=training)
        if not training:
            for trajectory in trajectories:
                self.evaluated[group_id] = trajectory
                self.signal.episode(trajectory)
            self._drop("evaluated", deliver, trajectories)
            return
        if not self.curriculum.owns(group_id):
            self._drop("other_epoch", deliver, trajectories)
            return
        self.recent += trajectories
        for trajectory in trajectories:
            self.signal.episode(trajectory)
        failed = [t for t in trajectories if t.status == "failed"]
        self.counts.add("failed", failed)
        usable = [t for t in trajectories if _is_usable(t)]
        if self.families is not None:
            self.families.failed(failed)
            self._join_family(self.families, deliver, FamilyStage(group_id, deliver.unit_id, usable))
            return
        outcome = self._judged(usable)
        if outcome:
            self._free_room(Unit(deliver.unit_id, group_id, trajectories))
            self._drop(outcome, deliver, usable)
            return
        self._hold(Unit(deliver.unit_id, group_id, usable))

    def _join_family(self, families: WaitingFamilies, deliver: Deliver, stage: FamilyStage) -> None:
        if outcome := families.refuses(stage.group_id):
            self._drop(outcome, deliver, stage.members)
            return
        self.commits.hold(deliver.unit_id)
        self._settle(families.add(stage))

    def _settle(self, family: Unit | None) -> None:
        """Put a family that waits for nothing more to the ready units, or drop it if it would train nothing."""
        if family is None:
            return
        if outcome := self._judged(family.trajectories):
            self._let_go(family, outcome)
        else:
            self.ready.append(family)

    def close_overdue(self, now: float) -> None:
        """Close families whose next group has not come in time; ``now`` is monotonic, in seconds."""
        for family in self.families.overdue(now) if self.families is not None else ():
            self._settle(family)

    def _let_go(self, unit: Unit, outcome: str) -> None:
        """Drop a unit with all its deliveries; what its family would not train keeps an outcome of its own."""
        self._free_room(unit)
        for part in unit.parts:
            self.commits.drop_held(part.unit_id)
            for name, trajectories in {outcome: part.trained, **part.dropped}.items():
                self.counts.add(name, trajectories)

    def _is_committed(self, unit_id: str, segments: list[SegmentArrays]) -> bool:
        """Return whether this unit was committed, and is not a new one with a reused id.

        A broker that lost its journal uses ids again.
        """
        if unit_id not in self.commits.committed:
            return False
        return not (self.windows and segments and self.open.begun_anew(segments))

    def _commit_again(self, deliver: Deliver, segments: list[SegmentArrays]) -> None:
        """Queue a repeated commit for a unit that was committed and has been delivered again."""
        ends = {segment.trajectory_id for segment, _ in segments if segment.status != "unfinished"}
        tokens = sum(segment.action_tokens for segment, _ in segments)
        self.counts.note(RECOMMITTED, len(ends), tokens)
        self.commits.repeat(deliver.unit_id)
        group_id = _group_id(deliver, segments)
        if self.curriculum.is_evaluation(group_id):
            return
        if deliver.complete or deliver.unit_id == group_id:
            self._will_not_come(group_id, deliver.unit_id)

    def _hold(self, unit: Unit) -> None:
        self.commits.hold(unit.unit_id)
        self.ready.append(unit)

    def _judged(self, usable: Sequence[Trajectory]) -> str:
        """Return the outcome of a group that would train nothing, and note whether the group has a signal."""
        outcome = self._fault(usable)
        if self.filter_uniform and outcome in ("", "uniform"):
            self.signal.group([t.return_ for t in usable if not t.baseline], uniform=outcome == "uniform")
        return outcome

    def _fault(self, usable: Sequence[Trajectory]) -> str:
        """Return the outcome of a group that would train nothing; "" if it would train something."""
        config = self.curriculum.config
        baselines = sum(t.baseline for t in usable)
        if baselines == len(usable) or (config.group_members > config.group_size and not baselines):
            # There is nothing to train, or no greedy baseline to compare with.
            return "unusable"
        signal = not self.filter_uniform or has_signal(config.algorithm.advantage, usable)
        if not signal and not self.rescuable(usable):
            return "uniform"
        return ""

    def _window(self, deliver: Deliver, segments: list[SegmentArrays]) -> None:
        """Process the next window of a trajectory; the tokens before it become its context."""
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
                self._free_member(segment.group_id, segment.task_id)
            return
        (trajectory,) = self._valued([self._placed(trajectory)], group=False, training=True)
        if trajectory.status != "unfinished":
            self.recent.append(trajectory)
            self.signal.episode(trajectory)
        unit = Unit(deliver.unit_id, segment.group_id, [trajectory])
        if trajectory.status == "failed" or not trajectory.window_tokens:
            self._free_room(unit)
            self._drop("failed" if trajectory.status == "failed" else "context", deliver, [trajectory])
            return
        self._hold(unit)

    def _free_room(self, unit: Unit) -> None:
        """Free the unit's room; the room of a trajectory becomes free with its last window."""
        if unit.unit_id == unit.group_id:
            self.curriculum.free(unit.group_id)
            if self.families is not None:
                self.families.forget(unit.group_id)
            return
        for trajectory in unit.trajectories:
            if trajectory.status != "unfinished":
                self._free_member(unit.group_id, names.task_of(trajectory.trajectory_id))

    def _free_member(self, group_id: str, task_id: str) -> None:
        self.open.forget(task_id)
        self.curriculum.free_member(group_id, task_id)

    def _will_not_come(self, group_id: str, unit_id: str) -> None:
        """Stop waiting for this group, or for this member of it."""
        if self.curriculum.is_evaluation(group_id):
            self.evaluated[group_id] = None
            return
        if unit_id in ("", group_id):
            if self.families is not None:
                if self.curriculum.owns(group_id):
                    self._settle(self.families.lost(group_id))
                return
            for task in self.curriculum.outstanding.get(group_id, []):
                self.open.forget(task.task_id)
            self.curriculum.free(group_id)
            return
        # The unit is named by the task, or by its trajectory.
        name = names.without_window(unit_id)
        task_id = name if self.curriculum.awaits(group_id, name) else names.task_of(name)
        self._free_member(group_id, task_id)

    def _assemble(self, segments: list[SegmentArrays]) -> list[Trajectory]:
        """Assemble the unit's trajectories. A broken one is counted and left out; its group stays."""
        by_id: dict[str, list[SegmentArrays]] = {}
        for part in segments:
            by_id.setdefault(part.segment.trajectory_id, []).append(part)
        trajectories = []
        for pieces in by_id.values():
            try:
                trajectories.append(self._placed(assemble(pieces)))
            except BrokenTrajectory as error:
                log.error("trajectory rejected: %s", error)
                self.counts.note("rejected", 1, sum(segment.action_tokens for segment, _ in pieces))
        return trajectories

    def _placed(self, trajectory: Trajectory) -> Trajectory:
        """Replace versions of undone steps by those of the newest line.

        The new versions have equal lag, so all later code gets the policy lag by subtracting version numbers.
        """
        return replace(trajectory, policy_version=self.line.placed(trajectory.policy_version))

    def _valued(self, trajectories: Sequence[Trajectory], *, group: bool, training: bool) -> list[Trajectory]:
        """Compose the rewards of trajectories, as a whole group or each by itself. Failed ones have no say.

        Evaluations have the final weights only, so that their returns can be compared over a run.
        """
        config = self.curriculum.config.reward
        if not training:
            config, group = RewardConfig(weights=config.weights_in_force), False
        if group:
            usable = iter(self.composed(config, [t for t in trajectories if _is_usable(t)]))
            return [next(usable) if _is_usable(t) else t for t in trajectories]
        return [valued for t in trajectories for valued in self.composed(config, [t], group=False)]

    def composed(
        self, config: RewardConfig, members: Sequence[Trajectory], *, group: bool = True
    ) -> list[Trajectory]:
        """Compose the rewards of members in the stage of their newest token, from those that the environment gave."""
        if not members:
            return []
        updates = updates_at(self.line, newest_version(members))
        return composed(config, [as_given(t) for t in members], group=group, updates=updates)

    def _drop(self, outcome: str, deliver: Deliver, trajectories: Sequence[Trajectory]) -> None:
        self.counts.add(outcome, trajectories)
        self.commits.drop(deliver.unit_id)


def _is_usable(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be trained."""
    return trajectory.status != "failed" and bool(trajectory.action_tokens)


def _group_id(deliver: Deliver, segments: Sequence[SegmentArrays]) -> str:
    return segments[0][0].group_id if segments else names.group_of_unit(deliver.unit_id)
