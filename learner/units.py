"""What is trained together, and the count of what is not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.trajectory import Trajectory

RECOMMITTED = "recommitted"
"""Outcome of units that came again after they had been committed."""


@dataclass(frozen=True)
class Unit:
    """One delivery: the trajectories of a rollout group, a single one, or a window of one."""

    unit_id: str
    group_id: str
    trajectories: list[Trajectory]

    @property
    def tokens(self) -> int:
        """Action tokens it was delivered for."""
        return sum(t.window_tokens for t in self.trajectories)


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

    @property
    def arrived_tokens(self) -> int:
        """Action tokens, those that came twice once."""
        return sum(self.tokens.values()) - self.tokens.get(RECOMMITTED, 0)


def has_signal(trajectories: Sequence[Trajectory]) -> bool:
    """Whether a group-relative advantage can be anything but zero: two members with different returns.

    A greedy member serves as baseline and is no part of the comparison.
    """
    return len({t.return_ for t in trajectories if not t.baseline}) > 1


def newest_version(trajectories: Sequence[Trajectory]) -> int:
    """Version of the freshest token that would be trained."""
    return max(int(t.policy_version[t.window_start :].max(initial=-1)) for t in trajectories)
