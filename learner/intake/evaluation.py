"""The result of an evaluation: how many tasks were answered, failed or never run, and means over the answered ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from learner.gauges import HELDOUT_REWARD
from learner.trajectory import Trajectory
from protocol.failures import FailureCounts, failure_or_text

MISSING_SHARE = 0.05
"""An evaluation of which a larger share of the tasks was never run has no result."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation. The means are None if there is nothing to take a mean of."""

    tasks: int
    answered: int
    """Tasks whose episode ended, right or wrong."""
    failed: int
    """Tasks that the environment or the model failed."""
    not_run: int
    """Tasks that were given up, or that no generator could continue."""
    accuracy: float | None
    """Share of the answered tasks that are right. None also if the environment does not say what is right."""
    return_mean: float | None
    """Mean return of the answered tasks."""
    why: str
    """Most frequent reason of failures, or ""."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Mean of each reward by name, without weights, over the answered tasks that have it."""

    @property
    def missing(self) -> bool:
        """Whether so many tasks were never run that the answered ones say nothing about the others."""
        return self.not_run > MISSING_SHARE * self.tasks

    def record(self, *, tag: str, step: int, policy_version: int) -> dict[str, Any]:
        """Return the entry of ``evaluations`` in ``summary.json``."""
        return {
            "tag": tag,
            "step": step,
            "policy_version": policy_version,
            "tasks": self.tasks,
            "answered": self.answered,
            "failed": self.failed,
            "not_run": self.not_run,
            "accuracy": self.accuracy,
            "return_mean": self.return_mean,
            "why": self.why,
            "rewards": self.rewards,
        }

    def scalars(self) -> dict[str, float]:
        """Return the metrics of the evaluation; means that are None are left out."""
        means = {"evaluation/accuracy": self.accuracy, "evaluation/return_mean": self.return_mean}
        return {
            "evaluation/answered_tasks": float(self.answered),
            "evaluation/failed_tasks": float(self.failed),
            "evaluation/not_run_tasks": float(self.not_run),
            **{name: value for name, value in means.items() if value is not None},
            **{HELDOUT_REWARD + name: mean for name, mean in self.rewards.items()},
        }

    def sentence(self) -> str:
        """Return the result in words, for the log."""
        parts = [f"{self.answered} of {self.tasks} tasks answered"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.not_run} never run"] if self.not_run else []
        counts = ", ".join(parts) + (f": {self.why}" if self.why else "")
        if self.missing:
            return f"no result ({counts})"
        means = [f"accuracy {self.accuracy:.3f}"] if self.accuracy is not None else []
        means += [f"return {self.return_mean:.3f}"] if self.return_mean is not None else []
        return f"{', '.join(means) or 'no result'} ({counts})"


def result_of(episodes: Sequence[Trajectory | None]) -> EvaluationResult:
    """Return the result of an evaluation.

    Args:
        episodes: one trajectory for each task; None for a task that was given up.

    Example:
        >>> result_of([None]).missing, result_of([None]).accuracy
        (True, None)
    """
    answered: list[Trajectory] = []
    failures, not_run = FailureCounts(), 0
    for episode in episodes:
        if episode is None:
            not_run += 1
        elif episode.status != "failed":
            answered.append(episode)
        else:
            failure = failure_or_text(episode.failure, episode.error)
            failures.add(failure)
            not_run += not failure.fault
    counts = EvaluationResult(
        tasks=len(episodes),
        answered=len(answered),
        failed=len(episodes) - len(answered) - not_run,
        not_run=not_run,
        accuracy=None,
        return_mean=None,
        why=failures.sentence(),
    )
    if counts.missing or not answered:
        return counts
    return_mean = float(np.mean([t.return_ for t in answered]))
    return replace(
        counts,
        accuracy=share_correct(answered),
        return_mean=return_mean,
        rewards=mean_rewards(answered),
    )


def mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each reward by name, without weights, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_by_name.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in sorted(values.items())}


def share_correct(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of trajectories that solved their task, or None if the environment never says so."""
    if all(t.correct is None for t in trajectories):
        return None
    return float(np.mean([t.correct is True for t in trajectories]))
