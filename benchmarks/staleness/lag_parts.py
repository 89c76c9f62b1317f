"""Curricula and the exchange for experiments on staleness: sampled evaluations, token limits, counted lags."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from envs.base import Split
from learner.curriculum import Curriculum
from learner.intake.session import Exchange
from learner.settings.learner import EvaluationConfig
from learner.trajectory import Unit
from protocol.messages.episodes import Task


class SampledCurriculum(Curriculum):
    """A curriculum that evaluates by sampling, because training raises the mean return of samples."""

    def evaluation(self, tag: str, version: int, of: EvaluationConfig) -> list[Task]:
        sampling = self._sampling(temperature=self.config.sampling.temperature)
        tasks = super().evaluation(tag, version, of)
        return [msgspec.structs.replace(task, sampling=sampling) for task in tasks]


class BudgetedCurriculum(SampledCurriculum):
    """A curriculum with a token limit per task: the task fixes the lengths, whatever the policy learns."""

    budget: Callable[[int, Split], int] | None = None
    """Function from a task's index and split to a response's token limit. None: the limit of the settings."""

    def refill(self, **room: Any) -> list[Task]:
        return [self._budgeted(task) for task in super().refill(**room)]

    def evaluation(self, tag: str, version: int, of: EvaluationConfig) -> list[Task]:
        return [self._budgeted(task) for task in super().evaluation(tag, version, of)]

    def _budgeted(self, task: Task) -> Task:
        if self.budget is None:
            return task
        tokens = self.budget(task.data["index"], task.data["split"])
        sampling = msgspec.structs.replace(task.sampling, max_turn_tokens=tokens)
        return msgspec.structs.replace(task, sampling=sampling)


class CountingExchange(Exchange):
    """An exchange that counts the lag of each action token of each batch, to prove that the lag was forced.

    Replayed tokens are not counted, because they do not come through the exchange.
    """

    def collect(self, *, step: int, version: int) -> list[Unit]:
        groups = super().collect(step=step, version=version)
        lags: Counter[int] = Counter()
        for trajectory in (t for group in groups for t in group.trajectories):
            lags.update((version - trajectory.policy_version[trajectory.action_mask > 0]).tolist())
        self.lags_by_step[step] = lags
        return groups

    @cached_property
    def lags_by_step(self) -> dict[int, Counter[int]]:
        return {}


def lag_is_exact(
    lags_by_step: Mapping[int, Counter[int]], lag: int, steps: int, *, warmup_steps: int = 0
) -> bool:
    """Return whether each step has tokens, and each token lags by the versions so far, at most ``lag``.

    In the first ``warmup_steps`` only a critic learns, and the version does not change.

    Example:
        >>> lag_is_exact({0: Counter({0: 9}), 1: Counter({1: 9}), 2: Counter({1: 9})}, lag=1, steps=3)
        True
        >>> lag_is_exact({0: Counter({0: 9}), 1: Counter({1: 9}), 2: Counter({1: 8, 2: 1})}, lag=1, steps=3)
        False
    """
    return set(lags_by_step) == set(range(steps)) and all(
        set(lags) == {min(max(0, step - warmup_steps), lag)} for step, lags in lags_by_step.items()
    )
