"""Evaluates held-out tasks: results of a set, pass@k and its confidence interval."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from learner.gauges import HELDOUT_REWARD, evaluation_tag
from learner.settings.learner import EvaluationConfig
from learner.trajectory import Trajectory
from protocol.failures import FailureCounts, failure_or_text
from protocol.messages.episodes import Task

log = logging.getLogger(__name__)

Z = 1.959963984540054
"""Quantile of the normal distribution for an interval of 95 %."""


class Estimate(NamedTuple):
    """A mean over tasks with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k answers to a task is right.

    It is 1 - C(n - c, k) / C(n, k) with n answers, of which c are right (arXiv:2107.03374, equation 1).

    Args:
        answers: n, number of answers. At least k.
        right: c, number of right ones. 0 to n.
        k: number of answers that one may try. At least 1.

    Raises:
        ValueError: the numbers are out of range.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 1, 4)
        (0.25, 0.5, 1.0)
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {right} right among {answers} answers: needed are 1 <= k <= answers")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def mean_over_tasks(values: Sequence[float]) -> Estimate:
    """Return the mean of one value for each task, in [0, 1], and its 95 % interval.

    If every task is right or wrong, the interval is Wilson's. Otherwise it comes from the spread of the tasks, which
    are independent where the answers to one task are not.

    Raises:
        ValueError: there are no values.

    Example:
        >>> [round(x, 3) for x in mean_over_tasks([1.0, 0.0, 1.0, 1.0])]
        [0.75, 0.301, 0.954]
        >>> [round(x, 3) for x in mean_over_tasks([0.5, 0.25, 0.75, 0.5])]
        [0.5, 0.3, 0.7]
    """
    if not values:
        raise ValueError("a mean over no tasks")
    n, mean = len(values), float(np.mean(values))
    if all(value in (0.0, 1.0) for value in values):
        centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    elif n == 1:
        return Estimate(mean, 0.0, 1.0)
    else:
        centre, half = mean, Z * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


MISSING_SHARE = 0.05
"""An evaluation of which a larger share of the answers never ran has no result."""


class Evaluator(Protocol):
    """Runs the episodes of an evaluation: a `BrokerSession`, or a script in a test."""

    def evaluate(self, tag: str, of: EvaluationConfig, *, version: int) -> list[Trajectory | None]: ...


class EvaluatorBeside(Evaluator, Protocol):
    """Runs episodes of evaluations while the learner trains: a `BrokerSession`, or a script in a test."""

    def begin_evaluation(self, tag: str, of: EvaluationConfig, *, version: int) -> list[Task]: ...
    def evaluation_out(self, tasks: Sequence[Task]) -> int: ...
    def await_evaluation(self, tag: str, tasks: Sequence[Task]) -> None: ...
    def end_evaluation(self, tasks: Sequence[Task]) -> list[Trajectory | None]: ...


def sampled_by(version: int, episodes: Sequence[Trajectory | None]) -> list[Trajectory | None]:
    """Return the answers of which ``version`` sampled every token, and None in place of the others.

    A number of two versions would be a number of none.
    """
    return [
        t if t is not None and bool((t.policy_version[t.action_mask] == version).all()) else None
        for t in episodes
    ]


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation. The means are None if there is nothing to take a mean of.

    With one answer to each task, the numbers of answers are numbers of tasks.
    """

    tasks: int
    samples: int
    """Answers that were asked for each task."""
    answered: int
    """Answers whose episode ended, right or wrong."""
    failed: int
    """Answers that the environment or the model failed. They count as wrong."""
    not_run: int
    """Answers that were given up, or that no generator could continue. They count as nothing."""
    accuracy: float | None
    """Mean over tasks of the share of right answers, which is pass@1. None also if the environment does not say what
    is right."""
    return_mean: float | None
    """Mean return of the answers that ended."""
    why: str
    """Most frequent reason of failures, or ""."""
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    """pass@k by k, with intervals: for k = 1, which is the accuracy, and the further ones that were asked for."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Mean of each reward by name, without weights, over the answers that ended and have it."""

    @property
    def missing(self) -> bool:
        """Whether so many answers never ran that the others say nothing about them."""
        return self.not_run > MISSING_SHARE * self.tasks * self.samples

    def record(self, *, tag: str, step: int, policy_version: int, name: str = "") -> dict[str, Any]:
        """Return the entry of ``evaluations`` in ``summary.json``; ``name`` is the set's."""
        return {
            "set": name,
            "tag": tag,
            "step": step,
            "policy_version": policy_version,
            "tasks": self.tasks,
            "samples": self.samples,
            "answered": self.answered,
            "failed": self.failed,
            "not_run": self.not_run,
            "accuracy": self.accuracy,
            "return_mean": self.return_mean,
            "pass_at": {str(k): list(estimate) for k, estimate in self.pass_at.items()},
            "rewards": self.rewards,
            "why": self.why,
        }

    def scalars(self, name: str = "") -> dict[str, float]:
        """Return the metrics of the evaluation; means that are None are left out."""
        means = {"accuracy": self.accuracy, "return_mean": self.return_mean}
        further = {f"pass_at_{k}": estimate.value for k, estimate in self.pass_at.items() if k > 1}
        found = {
            "answered_tasks": float(self.answered),
            "failed_tasks": float(self.failed),
            "not_run_tasks": float(self.not_run),
            **{mean: value for mean, value in means.items() if value is not None},
            **further,
        }
        rewards = {} if name else {HELDOUT_REWARD + reward: mean for reward, mean in self.rewards.items()}
        return {**{evaluation_tag(name, metric): value for metric, value in found.items()}, **rewards}

    def sentence(self) -> str:
        """Return the result in words, for the log."""
        one = self.samples == 1
        asked = f"{self.tasks} tasks answered" if one else f"{self.tasks} x {self.samples} answers came"
        parts = [f"{self.answered} of {asked}"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.not_run} never run"] if self.not_run else []
        counts = ", ".join(parts) + (f": {self.why}" if self.why else "")
        if self.missing:
            return f"no result ({counts})"
        means = [f"accuracy {self.accuracy:.3f}"] if self.accuracy is not None else []
        means += [f"pass@{k} {estimate.value:.3f}" for k, estimate in self.pass_at.items() if k > 1]
        means += [f"return {self.return_mean:.3f}"] if self.return_mean is not None else []
        return f"{', '.join(means) or 'no result'} ({counts})"


def measure(
    session: Evaluator, tag: str, of: EvaluationConfig, *, version: int
) -> tuple[EvaluationResult, list[Trajectory | None]]:
    """Run an evaluation. Return its result and its episodes. If too many answers never ran, it is repeated once.

    Args:
        session: runs the episodes.
        tag: name of the evaluation, unique in the process.
        of: the set.
        version: policy version that samples, or a later one.

    Raises:
        NoData: nothing arrived within the deadline.
        Stopped: the run was asked to end.
    """
    episodes = session.evaluate(tag, of, version=version)
    result = result_of(episodes, of)
    if result.missing:
        log.warning("evaluation %s is repeated: %s", tag, result.sentence())
        episodes = session.evaluate(f"{tag} again", of, version=version)
        result = result_of(episodes, of)
    return result, episodes


def result_of(
    episodes: Sequence[Trajectory | None], config: EvaluationConfig | None = None
) -> EvaluationResult:
    """Return the result of an evaluation.

    Args:
        episodes: the answers of the first task, then those of the second, and so on; None for one that was given up.
        config: settings of the evaluation; None: one answer to each task.

    Example:
        >>> result_of([None]).missing, result_of([None]).accuracy
        (True, None)
    """
    samples = 1 if config is None else config.samples
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
        tasks=len(episodes) // samples,
        samples=samples,
        answered=len(answered),
        failed=len(episodes) - len(answered) - not_run,
        not_run=not_run,
        accuracy=None,
        return_mean=None,
        why=failures.sentence(),
    )
    if counts.missing or not answered:
        return counts
    result = replace(
        counts, return_mean=float(np.mean([t.return_ for t in answered])), rewards=mean_rewards(answered)
    )
    if share_correct(answered) is None:
        return result
    groups = [episodes[start : start + samples] for start in range(0, len(episodes), samples)]
    pass_at = _pass_at(groups, (1,) if config is None else (1, *config.ks))
    return replace(result, accuracy=pass_at[1].value, pass_at=pass_at)


def mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each reward by name, without weights, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_by_name.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in sorted(values.items())}


def _pass_at(groups: Sequence[Sequence[Trajectory | None]], ks: Sequence[int]) -> dict[int, Estimate]:
    """Return pass@k over the tasks of which at least k answers count."""
    counted = [_right_of(answers) for answers in groups]
    found = {}
    for k in ks:
        shares = [pass_at_k(n, right, k) for n, right in counted if n >= k]
        if shares:
            found[k] = mean_over_tasks(shares)
    return found


def _right_of(answers: Sequence[Trajectory | None]) -> tuple[int, int]:
    """Return how many answers to a task count, and how many of them are right.

    An answer that the environment or the model failed is wrong; one that never ran does not count.
    """
    counted = [
        t
        for t in answers
        if t is not None and (t.status != "failed" or failure_or_text(t.failure, t.error).fault)
    ]
    return len(counted), sum(t.correct is True and t.status != "failed" for t in counted)


def share_correct(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of trajectories that solved their task, or None if the environment never says so."""
    if all(t.correct is None for t in trajectories):
        return None
    return float(np.mean([t.correct is True for t in trajectories]))
