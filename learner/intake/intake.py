"""The learner's units from their delivery to their commit: received, ready, held, dropped or trained. Pure."""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from learner.comparisons import has_signal
from learner.curriculum import Curriculum, SignalWatch
from learner.errors import BrokenTrajectory, LedgerViolation
from learner.families.family import FamilyStage
from learner.intake.trajectories import (
    OpenTrajectories,
    compose_at_version,
    compose_rewards,
    in_lane,
    is_usable,
    place_on_line,
    trajectories_of,
)
from learner.intake.waiting_families import WaitingFamilies
from learner.settings.advantages import RewardConfig
from learner.trajectory import RECOMMITTED, Counts, RouteLayers, Trajectory, Unit, newest_version
from protocol import names
from protocol.arrays import SegmentArrays
from protocol.codec import AnyMessage, decode_delivery
from protocol.errors import ProtocolError
from protocol.messages.episodes import Commit, Deliver, Dropped, Task
from protocol.messages.peers import QueueStats
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)

REMEMBERED_UNITS = 65_536
"""Number of committed units that are remembered; the oldest are removed first."""


class Commitment(NamedTuple):
    """How and when a unit was committed."""

    step: int
    """First learner step whose checkpoint contains the commit."""
    trained: bool
    """True if the unit entered a gradient; else it was dropped."""
    version: int = -1
    """Policy version that the step updated; -1 for a dropped unit."""


class CommitMemory:
    """The last committed units, oldest first. They are part of the checkpoint.

    If the broker delivers one of them again, its commit was lost, with a killed process or with a connection.
    The learner commits the unit again and does not train it.

    Example:
        >>> committed = CommitMemory(size=2)
        >>> for i, unit in enumerate(["1g0", "1g1", "1g2"]): committed.add(unit, step=i, trained=True)
        >>> "1g0" in committed, committed["1g2"]
        (False, Commitment(step=2, trained=True, version=-1))
    """

    def __init__(self, size: int = REMEMBERED_UNITS) -> None:
        self._size = size
        self._units: OrderedDict[str, Commitment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, unit_id: str) -> bool:
        return unit_id in self._units

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __getitem__(self, unit_id: str) -> Commitment:
        return self._units[unit_id]

    def add(self, unit_id: str, *, step: int, trained: bool, version: int = -1) -> None:
        """Add a unit, and remove the oldest ones beyond the size."""
        self._units[unit_id] = Commitment(step, trained, version)
        self._units.move_to_end(unit_id)
        while len(self._units) > self._size:
            self._units.popitem(last=False)

    def state(self) -> list[Any]:
        """Return the units for the checkpoint."""
        return [[unit_id, *commitment] for unit_id, commitment in self._units.items()]

    def restore(self, state: Iterable[Any]) -> None:
        """Restore the units that `state` returned."""
        self._units.clear()
        for unit_id, *commitment in state:
            self.add(unit_id, **Commitment(*commitment)._asdict())


@dataclass
class UnitCommits:
    """Deliveries between their arrival and their commit, and the memory of those that were committed.

    Example:
        >>> commits = UnitCommits()
        >>> commits.hold_unit("1g0"); commits.drop_unit("1g1")
        >>> "1g0" in commits, "1g1" in commits, "1g2" in commits
        (True, True, False)
        >>> commits.commit(1, 7, []).dropped
        ['1g1']
        >>> commits.repeat_commits_of(["1g1", "1g2"]), [again.dropped for again in commits.recommit(1)]
        (1, [['1g1']])
    """

    committed: CommitMemory = field(default_factory=CommitMemory)
    held_units: set[str] = field(default_factory=set)
    """Deliveries that wait for their family, are ready or are being trained."""
    _dropped: list[str] = field(default_factory=list)
    """Units that were dropped and are not committed yet."""
    _recommits: list[str] = field(default_factory=list)
    """Units whose commit must be repeated."""

    def __contains__(self, unit_id: str) -> bool:
        """Return whether a delivery is here: its commit is not sent yet."""
        return unit_id in self.held_units or unit_id in self._dropped

    def hold_unit(self, unit_id: str) -> None:
        """Note a delivery that is to be trained."""
        self.held_units.add(unit_id)

    def drop_unit(self, unit_id: str) -> None:
        """Note a new delivery that will not be trained. The next commit names it."""
        self._dropped.append(unit_id)

    def drop_held_unit(self, unit_id: str) -> None:
        """Note that a held delivery will not be trained after all. The next commit names it."""
        self.held_units.remove(unit_id)
        self._dropped.append(unit_id)

    def commit(
        self, epoch: int, step: int, trained: Sequence[Unit], replayed_tokens: int = 0, version: int = -1
    ) -> Commit | None:
        """Note units as trained and return the Commit to send; None if there is nothing to commit.

        Args:
            epoch: number of this learner process.
            step: learner step of the commit.
            trained: units that entered a gradient. Units dropped since the last commit are added.
            replayed_tokens: replayed tokens that were trained in the step.
            version: policy version that the step updated.
        """
        parts = [part for unit in trained for part in unit.parts]
        families = {names.family_of(part.unit_id) for part in parts}
        # A group that came too late for its family waits for the next commit: beside its family it would look like one
        # that the family was trained with, to `offbeat retrain`.
        late = [unit for unit in self._dropped if names.stage_of(unit) and names.family_of(unit) in families]
        self._dropped = [unit for unit in self._dropped if unit not in late]
        for part in parts:
            self.held_units.remove(part.unit_id)
            if part.trained:
                self.committed.add(part.unit_id, step=step, trained=True, version=version)
            else:
                self._dropped.append(part.unit_id)
        dropped, self._dropped = self._dropped, late
        for unit_id in dropped:
            self.committed.add(unit_id, step=step, trained=False)
        if not trained and not dropped:
            return None
        return Commit(
            epoch=epoch,
            step=step,
            trained=[part.unit_id for part in parts if part.trained],
            dropped=dropped,
            replayed_tokens=replayed_tokens,
            version=version if trained else -1,
        )

    def repeat_commit(self, unit_id: str) -> None:
        """Queue the commit of a unit to be repeated, because the unit was delivered again."""
        self._recommits.append(unit_id)

    def repeat_commits_of(self, held: Iterable[str]) -> int:
        """Queue commits to repeat for units that the broker still holds. Return their number.

        A unit that is ready or dropped here is left out, even if it was committed before under the same id:
        it is a new unit of a broker that lost its journal and uses ids again.
        """
        here = self.held_units | set(self._dropped)
        units = [unit_id for unit_id in held if unit_id in self.committed and unit_id not in here]
        self._recommits += units
        return len(units)

    def recommit(self, epoch: int) -> list[Commit]:
        """Return the repeated commits queued since the last call, each for the step of its first commit."""
        again, self._recommits = dict.fromkeys(self._recommits), []
        steps = sorted({self.committed[unit_id].step for unit_id in again})
        units = [(unit_id, self.committed[unit_id]) for unit_id in again]
        return [
            Commit(
                epoch=epoch,
                step=step,
                trained=[unit_id for unit_id, was in units if was.step == step and was.trained],
                dropped=[unit_id for unit_id, was in units if was.step == step and not was.trained],
                version=max(was.version for _, was in units if was.step == step),
            )
            for step in steps
        ]


def check_ledger(
    *, delivered: int, trained: int, outcomes: Mapping[str, int], ready: int, kept: int = 0
) -> None:
    """Check that no action token was lost or counted twice.

    The check is for the time between two learner steps, when no unit is being trained. Each segment of a
    growing trajectory was delivered as a window and is counted as such. Evaluation counts as an outcome.

    Args:
        delivered: action tokens of all delivered units; a unit that came again while it was here counts once.
        trained: action tokens of units that were in a batch.
        outcomes: action tokens of all other units, by outcome; units that came again after their commit
            have an outcome of their own.
        ready: action tokens of units that wait to be trained.
        kept: action tokens of groups that wait for others of their family.

    Raises:
        LedgerViolation: ``delivered`` is not the sum of the others.

    Example:
        >>> check_ledger(delivered=10, trained=4, outcomes={"stale": 3}, ready=3)
        >>> check_ledger(delivered=10, trained=4, outcomes={"stale": 3}, ready=2)
        Traceback (most recent call last):
        ...
        learner.errors.LedgerViolation: of 10 action tokens that were delivered, 9 are accounted for ...
    """
    known = trained + sum(outcomes.values()) + ready + kept
    if known != delivered:
        raise LedgerViolation(
            f"of {delivered} action tokens that were delivered, {known} are accounted for (difference "
            f"{delivered - known}): trained {trained}, ready {ready}, kept {kept}, outcomes "
            f"{dict(outcomes)}. This is an error "
            "in the learner, not in the run file: what was trained since the last checkpoint is in doubt; please "
            "report it with the learner's log, and go on from that checkpoint with --resume"
        )


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
    route_layers: RouteLayers | None = None
    """Layers whose experts are replayed as the generators chose them; None: none are."""
    line: VersionLine = field(default_factory=VersionLine)
    """Line of versions by which the lag of tokens from undone steps is counted: see `trajectories.place_on_line`."""
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
    remembers_notices: bool = False
    """True until the broker has said what it holds for a process that continues."""
    _noticed: set[str] = field(default_factory=set)
    """Groups and tasks of which notices came until then, without what was chosen for them."""
    _failed_of: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Failed members of deliveries that are here, and their action tokens: they come again after a restart."""
    _noted: set[str] = field(default_factory=set)
    """Groups and tasks that `note_over_unseen` has counted."""
    sampled_tokens: int = 0
    """Action tokens that the generators report, summed over restarts of this process and of generators."""
    _sampled_gauge: float = 0.0
    """Newest report of the generators that there was."""

    def receive(self, message: AnyMessage, rest: Sequence[bytes]) -> None:
        """Process one message from the broker."""
        match message:
            case Deliver(unit_id=unit_id) if unit_id in self.commits:
                # Its commit is not sent yet, so there is nothing to repeat.
                log.debug("unit %s came again while it is here", unit_id)
            case Deliver():
                self.deliveries += 1
                self._receive_unit(message, rest)
            case Dropped():
                self.deliveries += 1
                if self._was_noted(message):
                    return
                # 0 trajectories: a window before the last. The gap shows when the next window comes.
                if message.trajectories:
                    self._stop_waiting_for(message.group_id, message.unit_id)
                self.counts.note(f"dropped_{message.reason}", message.trajectories)
            case QueueStats():
                # The gauge falls when a generator is restarted. It is missing until a generator has joined a broker
                # that was restarted, and then has what it had.
                now = message.gauges.get(SAMPLED, self._sampled_gauge)
                self.sampled_tokens += max(0, int(now - self._sampled_gauge))
                self._sampled_gauge, self.gauges = now, message.gauges

    def note_over_unseen(self) -> None:
        """Count the tasks behind the checkpoint that are over, because nobody who knew how they ended is left.

        An earlier process dropped their units in the step of its checkpoint, so that the broker released them at once.
        """
        unseen = [
            task_id
            for task_id in self.curriculum.over_unseen
            if not {task_id, names.group_of_task(task_id)} & self._noticed
        ]
        members = Counter(map(names.group_of_task, unseen))
        whole = {group for group, n in members.items() if n >= self.curriculum.config.first_members}
        self._noted, self._noticed, self.remembers_notices = {*unseen, *whole}, set(), False
        self.counts.note("dropped_over", len(unseen))

    def _was_noted(self, message: Dropped) -> bool:
        """Return whether `note_over_unseen` has counted this; remember the notice if it may be asked for yet."""
        # The unit is named by the task, or by its trajectory; without a name it is the group.
        unit = names.without_window(message.unit_id) or message.group_id
        known = {names.without_choice(name) for name in (unit, names.task_of(unit)) if name}
        if self.remembers_notices:
            self._noticed |= known
        return bool(known & self._noted)

    def _receive_unit(self, deliver: Deliver, rest: Sequence[bytes]) -> None:
        try:
            segments = decode_delivery(deliver, rest)
        except ProtocolError as error:
            log.error("delivery refused unit=%s: %s", deliver.unit_id, error)
            segments = []
        self.delivered_tokens += sum(segment.action_tokens for segment, _ in segments)
        if self._was_committed(deliver.unit_id, segments):
            self._repeat_commit(deliver, segments)
            return
        if self.windows and segments and segments[0][0].purpose == "train":
            self._receive_window(deliver, segments)
            return
        trajectories = trajectories_of(segments, self.line, self.counts, self.route_layers)
        if not trajectories:
            group_id = _group_id(deliver, segments)
            if deliver.complete or deliver.unit_id == group_id:
                self._stop_waiting_for(group_id, deliver.unit_id)
            self.drop_delivery(deliver.unit_id, "unusable", [])
            return
        group_id, training = trajectories[0].group_id, trajectories[0].purpose == "train"
        whole, config = deliver.unit_id == group_id, self.curriculum.config.reward
        trajectories = compose_rewards(trajectories, config, self.line, group=whole, training=training)
        if not training:
            for trajectory in trajectories:
                self.evaluated[group_id] = trajectory
                self.signal.episode(trajectory)
            self.drop_delivery(deliver.unit_id, "evaluated", trajectories)
        elif not self.curriculum.owns(group_id):
            self.drop_delivery(deliver.unit_id, "other_epoch", trajectories)
        else:
            self._receive_training(deliver.unit_id, group_id, trajectories)

    def _receive_training(self, unit_id: str, group_id: str, trajectories: list[Trajectory]) -> None:
        """Hold a group or a trajectory that this lineage asked for, unless it would train nothing."""
        if self.curriculum.config.lane is not None:
            trajectories = in_lane(self.curriculum.config, trajectories)
        self.recent += trajectories
        for trajectory in trajectories:
            self.signal.episode(trajectory)
        failed = [t for t in trajectories if t.status == "failed"]
        self.counts.add("failed", failed)
        if failed:
            self._failed_of[unit_id] = (len(failed), sum(t.window_tokens for t in failed))
        usable = [t for t in trajectories if is_usable(t)]
        if self.families is not None:
            self.families.note_failed(failed)
            self._add_to_family(self.families, FamilyStage(group_id, unit_id, usable))
            return
        outcome = self.judge_group(usable)
        if self.curriculum.under_way is not None:
            times = [t.seconds for t in trajectories]
            longest = max((t for t in times if t is not None), default=None)
            self.curriculum.under_way.arrived(longest, trained=not outcome)
        if outcome:
            self.free_room(Unit(unit_id, group_id, trajectories))
            self.drop_delivery(unit_id, outcome, usable)
            return
        self.hold_for_batch(Unit(unit_id, group_id, usable))

    def _add_to_family(self, families: WaitingFamilies, stage: FamilyStage) -> None:
        if outcome := families.outcome_if_late(stage.group_id):
            self.drop_delivery(stage.unit_id, outcome, stage.members)
            return
        self.commits.hold_unit(stage.unit_id)
        self.settle(families.add_group(stage))

    def _was_committed(self, unit_id: str, segments: list[SegmentArrays]) -> bool:
        """Return whether this unit was committed, and is not a new one with a reused id.

        A broker that lost its journal uses ids again.
        """
        if unit_id not in self.commits.committed:
            return False
        return not (self.windows and segments and self.open.begun_anew(segments))

    def _repeat_commit(self, deliver: Deliver, segments: list[SegmentArrays]) -> None:
        """Queue a repeated commit for a unit that was committed and has been delivered again."""
        ends = {segment.trajectory_id for segment, _ in segments if segment.status != "unfinished"}
        tokens = sum(segment.action_tokens for segment, _ in segments)
        self.counts.note(RECOMMITTED, len(ends), tokens)
        self.commits.repeat_commit(deliver.unit_id)
        group_id = _group_id(deliver, segments)
        if self.curriculum.is_evaluation(group_id):
            return
        if deliver.complete or deliver.unit_id == group_id:
            self._stop_waiting_for(group_id, deliver.unit_id)

    def _receive_window(self, deliver: Deliver, segments: list[SegmentArrays]) -> None:
        """Process the next window of a trajectory; the tokens before it become its context."""
        segment, last = segments[0][0], segments[-1][0]
        tokens = sum(piece.action_tokens for piece, _ in segments)
        if not self.curriculum.awaits(segment.group_id, segment.task_id):
            self.counts.note("other_epoch", 0, tokens)
            self.drop_delivery(deliver.unit_id, "other_epoch", [])
            return
        if self.open.displaced_by(segments):
            self.counts.note("broken", 1)
        try:
            trajectory = self.open.extend(segments, self.route_layers)
        except BrokenTrajectory as error:
            log.error("window rejected: %s", error)
            self.counts.note("broken", 1)
            trajectory = None
        if trajectory is None:
            self.counts.note("broken", 0, tokens)
            self.drop_delivery(deliver.unit_id, "broken", [])
            if last.status != "unfinished":
                self.free_member(segment.group_id, segment.task_id)
            return
        config, whole = self.curriculum.config.reward, [place_on_line(trajectory, self.line)]
        (trajectory,) = compose_rewards(whole, config, self.line, group=False, training=True)
        if trajectory.status != "unfinished":
            self.recent.append(trajectory)
            self.signal.episode(trajectory)
        unit = Unit(deliver.unit_id, segment.group_id, [trajectory])
        if trajectory.status == "failed" or not trajectory.window_tokens:
            self.free_room(unit)
            outcome = "failed" if trajectory.status == "failed" else "context"
            self.drop_delivery(deliver.unit_id, outcome, [trajectory])
            return
        self.hold_for_batch(unit)

    def _stop_waiting_for(self, group_id: str, unit_id: str) -> None:
        """Stop waiting for this group, or for this member of it."""
        curriculum = self.curriculum
        if curriculum.is_evaluation(group_id):
            self.evaluated[group_id] = None
            return
        if unit_id in ("", group_id):
            if self.families is not None:
                if curriculum.owns(group_id):
                    self.settle(self.families.note_lost(group_id))
                return
            for task in curriculum.outstanding.get(group_id, []):
                self.open.forget(task.task_id)
            curriculum.free(group_id)
            return
        # The unit is named by the task, or by its trajectory.
        name = names.without_window(unit_id)
        task_id = name if curriculum.awaits(group_id, name) else names.task_of(name)
        self.free_member(group_id, task_id)

    def take_batch(self, units: int, *, in_order: bool = False) -> list[Unit]:
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
        self.drop_units([g for g in self.ready if newest_version(g.trajectories) < oldest], "stale")

    def drop_units(self, units: Sequence[Unit], outcome: str) -> None:
        """Drop ready units and count them under an outcome."""
        for unit in units:
            self.ready.remove(unit)
            self._drop_held(unit, outcome)

    def take_recent(self) -> list[Trajectory]:
        """Return the training trajectories that arrived since the last call."""
        recent, self.recent = self.recent, []
        return recent

    def commit(
        self, epoch: int, step: int, trained: Sequence[Unit], replayed_tokens: int = 0, version: int = -1
    ) -> Commit | None:
        """Count units as trained, free their room, and return what `UnitCommits.commit` returns."""
        for unit in trained:
            self.free_room(unit)
            for part in unit.parts:
                self.trained_tokens += part.trained_tokens
                for outcome, trajectories in part.dropped.items():
                    self.counts.add(outcome, trajectories)
        message = self.commits.commit(epoch, step, trained, replayed_tokens, version)
        for unit_id in () if message is None else (*message.trained, *message.dropped):
            self._failed_of.pop(unit_id, None)
        return message

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
            "counts": _saved(self._counts_without_held()),
            "committed": self.commits.committed.state(),
            "trained_tokens": self.trained_tokens,
            "sampled_tokens": self.sampled_tokens,
            "sampled_gauge": self._sampled_gauge,
            "forks": list(self.line.forks),
            "signal": self.signal.state(),
        }

    def _counts_without_held(self) -> Counts:
        """Return the counts without failed members of units that are held: the broker delivers them again."""
        counts = Counts(dict(self.counts.trajectories), dict(self.counts.tokens))
        for unit_id, (trajectories, tokens) in self._failed_of.items():
            if unit_id in self.commits.held_units:
                counts.note("failed", -trajectories, -tokens)
        return counts

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.counts = Counts(**state["counts"])
        self.commits.committed.restore(state["committed"])
        self.trained_tokens, self.sampled_tokens = state["trained_tokens"], state["sampled_tokens"]
        self.delivered_tokens = self.trained_tokens + sum(self.counts.tokens.values())
        self._sampled_gauge = state["sampled_gauge"]
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

    def unanswered_tasks(self) -> list[Task]:
        """Return outstanding tasks whose result is not here; they are put again after a new join."""
        here = {
            names.task_of(unit_id) for unit_id in self.commits.held_units if names.window(unit_id) is None
        }
        return [
            task
            for group_id, tasks in self.curriculum.outstanding.items()
            if group_id not in self.commits.held_units
            for task in tasks
            if task.task_id not in here and not self.open.ended(task.task_id)
        ]

    def hold_for_batch(self, unit: Unit) -> None:
        """Put a delivery that is to be trained to the ready units."""
        self.commits.hold_unit(unit.unit_id)
        self.ready.append(unit)

    def drop_delivery(self, unit_id: str, outcome: str, trajectories: Sequence[Trajectory]) -> None:
        """Count a delivery that will not be trained under an outcome; the next commit names it."""
        self.counts.add(outcome, trajectories)
        self.commits.drop_unit(unit_id)

    def settle(self, family: Unit | None) -> None:
        """Put a family that waits for nothing more to the ready units, or drop it if it would train nothing."""
        if family is None:
            return
        if outcome := self.judge_group(family.trajectories):
            self._drop_held(family, outcome)
        else:
            self.ready.append(family)

    def close_overdue(self, now: float) -> None:
        """Close families whose next group has not come in time; ``now`` is monotonic, in seconds."""
        for family in self.families.overdue(now) if self.families is not None else ():
            self.settle(family)

    def _drop_held(self, unit: Unit, outcome: str) -> None:
        """Drop a unit with all its deliveries; what its family would not train keeps an outcome of its own."""
        self.free_room(unit)
        for part in unit.parts:
            self.commits.drop_held_unit(part.unit_id)
            for name, trajectories in {outcome: part.trained, **part.dropped}.items():
                self.counts.add(name, trajectories)

    def judge_group(self, usable: Sequence[Trajectory]) -> str:
        """Return the outcome of a group that would train nothing, and note whether the group has a signal."""
        outcome = self._why_untrained(usable)
        if self.filter_uniform and outcome in ("", "uniform"):
            returns = [t.return_ for t in usable if not (t.baseline or t.lane)]
            self.signal.group(returns, uniform=outcome == "uniform")
        return outcome

    def _why_untrained(self, usable: Sequence[Trajectory]) -> str:
        """Return the outcome of a group that would train nothing; "" if it would train something."""
        config = self.curriculum.config
        baselines = sum(t.baseline for t in usable)
        if all(t.baseline or t.lane for t in usable) or (
            config.group_members > config.group_size and not baselines
        ):
            # There is nothing to train, or no greedy baseline to compare with.
            return "unusable"
        signal = not self.filter_uniform or has_signal(config.algorithm.advantage, usable)
        if not signal and not self.rescuable(usable):
            return "uniform"
        return ""

    def free_room(self, unit: Unit) -> None:
        """Free the unit's room; the room of a trajectory becomes free with its last window.

        What is over now counts for the choice of tasks.
        """
        members = (t for part in unit.parts for ts in (part.trained, *part.dropped.values()) for t in ts)
        self.curriculum.note_ended(unit.group_id, members, unit.proposals)
        if unit.unit_id == unit.group_id:
            self.curriculum.free(unit.group_id)
            if self.families is not None:
                self.families.forget_family(unit.group_id)
            return
        for trajectory in unit.trajectories:
            if trajectory.status != "unfinished":
                self.free_member(unit.group_id, names.task_of(trajectory.trajectory_id))

    def free_member(self, group_id: str, task_id: str) -> None:
        """Free the room of a member of a group, of which nothing more will come."""
        self.open.forget(task_id)
        self.curriculum.free_member(group_id, task_id)

    def compose_rewards(self, config: RewardConfig, members: Sequence[Trajectory]) -> list[Trajectory]:
        """Compose the rewards of the members of a group, see `learner.intake.trajectories.compose_at_version`."""
        return compose_at_version(self.line, config, members)


def _saved(counts: Counts) -> dict[str, Any]:
    return {"trajectories": counts.trajectories, "tokens": counts.tokens}


def _group_id(deliver: Deliver, segments: Sequence[SegmentArrays]) -> str:
    return segments[0][0].group_id if segments else names.group_of_unit(deliver.unit_id)
