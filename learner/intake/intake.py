"""The learner's units from their delivery to their commit: ready, held, dropped or trained. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from learner.credit.reward_config import RewardConfig
from learner.credit.signal import has_signal
from learner.families.waiting import WaitingFamilies
from learner.intake.curriculum import Curriculum
from learner.intake.open_trajectories import OpenTrajectories
from learner.intake.signal_watch import SignalWatch
from learner.intake.token_audit import check_ledger
from learner.intake.trajectories import composed_at
from learner.intake.unit_commits import UnitCommits
from learner.trajectory import RouteLayers, Trajectory
from learner.units import Counts, Unit, newest_version
from protocol import names
from protocol.messages.episodes import Commit, Task
from protocol.version_line import VersionLine

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
    """Line of versions by which the lag of tokens from undone steps is counted: see `trajectories.placed`."""
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
            self.free_room(unit)
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

    def hold(self, unit: Unit) -> None:
        """Put a delivery that is to be trained to the ready units."""
        self.commits.hold(unit.unit_id)
        self.ready.append(unit)

    def drop_delivery(self, unit_id: str, outcome: str, trajectories: Sequence[Trajectory]) -> None:
        """Count a delivery that will not be trained under an outcome; the next commit names it."""
        self.counts.add(outcome, trajectories)
        self.commits.drop(unit_id)

    def settle(self, family: Unit | None) -> None:
        """Put a family that waits for nothing more to the ready units, or drop it if it would train nothing."""
        if family is None:
            return
        if outcome := self.judged(family.trajectories):
            self._let_go(family, outcome)
        else:
            self.ready.append(family)

    def close_overdue(self, now: float) -> None:
        """Close families whose next group has not come in time; ``now`` is monotonic, in seconds."""
        for family in self.families.overdue(now) if self.families is not None else ():
            self.settle(family)

    def _let_go(self, unit: Unit, outcome: str) -> None:
        """Drop a unit with all its deliveries; what its family would not train keeps an outcome of its own."""
        self.free_room(unit)
        for part in unit.parts:
            self.commits.drop_held(part.unit_id)
            for name, trajectories in {outcome: part.trained, **part.dropped}.items():
                self.counts.add(name, trajectories)

    def judged(self, usable: Sequence[Trajectory]) -> str:
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

    def free_room(self, unit: Unit) -> None:
        """Free the unit's room; the room of a trajectory becomes free with its last window."""
        if unit.unit_id == unit.group_id:
            self.curriculum.free(unit.group_id)
            if self.families is not None:
                self.families.forget(unit.group_id)
            return
        for trajectory in unit.trajectories:
            if trajectory.status != "unfinished":
                self.free_member(unit.group_id, names.task_of(trajectory.trajectory_id))

    def free_member(self, group_id: str, task_id: str) -> None:
        """Free the room of a member of a group, of which nothing more will come."""
        self.open.forget(task_id)
        self.curriculum.free_member(group_id, task_id)

    def composed(self, config: RewardConfig, members: Sequence[Trajectory]) -> list[Trajectory]:
        """Compose the rewards of the members of a group, see `learner.intake.trajectories.composed_at`."""
        return composed_at(self.line, config, members)
