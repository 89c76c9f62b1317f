"""Units, the broker's deliveries to the learner, and counts of those that were not trained."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.trajectory import Trajectory

RECOMMITTED = "recommitted"
"""Outcome of units that the broker delivered again after they had been committed."""


@dataclass(frozen=True)
class Unit:
    """One delivery of the broker: a rollout group, a single trajectory, or one window of a trajectory."""

    unit_id: str
    group_id: str
    trajectories: list[Trajectory]

    @property
    def tokens(self) -> int:
        """Action tokens of the unit; for a window, the tokens of the window only."""
        return sum(t.window_tokens for t in self.trajectories)


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
