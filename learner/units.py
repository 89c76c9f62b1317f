"""Units, the broker's deliveries to the learner, and counts of those that were not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from learner.trajectory import Trajectory

RECOMMITTED = "recommitted"
"""Outcome of units that the broker delivered again after they had been committed."""


@dataclass(frozen=True)
class UnitPart:
    """One delivery of the broker as a part of a unit: what of it is trained, and why the rest is not."""

    unit_id: str
    trained: Sequence[Trajectory]
    dropped: Mapping[str, Sequence[Trajectory]] = field(default_factory=dict)
    """Trajectories that are not trained, by outcome."""

    @property
    def trained_tokens(self) -> int:
        """Action tokens of the trajectories that are trained."""
        return sum(t.window_tokens for t in self.trained)

    @property
    def tokens(self) -> int:
        """Action tokens of all trajectories."""
        return self.trained_tokens + sum(t.window_tokens for ts in self.dropped.values() for t in ts)


@dataclass(frozen=True)
class Unit:
    """What is trained as a whole: a rollout group, a family of groups, a trajectory, or a window of a trajectory.

    All but a family are one delivery of the broker.
    """

    unit_id: str
    group_id: str
    trajectories: list[Trajectory]
    deliveries: tuple[UnitPart, ...] | None = None
    """Deliveries of a family; None if the unit is one delivery."""

    @property
    def parts(self) -> tuple[UnitPart, ...]:
        """Deliveries of the unit."""
        return (UnitPart(self.unit_id, self.trajectories),) if self.deliveries is None else self.deliveries

    @property
    def tokens(self) -> int:
        """Action tokens of all deliveries of the unit; of a window, the tokens of the window only."""
        return sum(part.tokens for part in self.parts)


@dataclass
class Counts:
    """Numbers of trajectories and of action tokens by outcome, of everything that was not trained."""

    trajectories: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: str, trajectories: Sequence[Trajectory]) -> None:
        """Count trajectories, and the action tokens of their windows, under an outcome."""
        if trajectories:
            self.note(outcome, len(trajectories), sum(t.window_tokens for t in trajectories))

    def note(self, outcome: str, trajectories: int, tokens: int = 0) -> None:
        """Count trajectories that were never assembled here, and the action tokens that did arrive."""
        if trajectories:
            self.trajectories[outcome] = self.trajectories.get(outcome, 0) + trajectories
        if tokens:
            self.tokens[outcome] = self.tokens.get(outcome, 0) + tokens

    def total(self, *outcomes: str) -> int:
        """Return the number of trajectories with one of these outcomes."""
        return sum(self.trajectories.get(outcome, 0) for outcome in outcomes)

    @property
    def arrived_tokens(self) -> int:
        """Action tokens that arrived and were not trained; tokens that arrived twice count once."""
        return sum(self.tokens.values()) - self.tokens.get(RECOMMITTED, 0)


def newest_version(trajectories: Sequence[Trajectory]) -> int:
    """Return the policy version of the newest token in the windows."""
    return max(int(t.policy_version[t.window_start :].max(initial=-1)) for t in trajectories)
