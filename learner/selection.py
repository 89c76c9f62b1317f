"""Which task a rollout group gets: by the number of the group alone, or by what the answers so far show. Pure.

With the kinds "sequential" and "epochs" the task depends on the number of the group, the settings and the seed of the
run alone, see `task_index`. The other kinds choose by `TaskStats`. Then the name of the group says what was chosen
(`protocol.names.Choice`), so that a restarted learner knows it of every group that the broker holds.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from learner.settings.selection import (
    ChosenSelection,
    EpochsSelection,
    FailuresSelection,
    FilterSelection,
    NearSelection,
    PopulationSelection,
    PruneSelection,
    SelectionConfig,
    SequentialSelection,
    ValueSelection,
)
from learner.trajectory import is_right
from protocol.arrays import Float64s

Mask = NDArray[np.bool_]


def task_index(selection: SelectionConfig, group: int, seed: int = 0) -> int:
    """Return the number of the task that a group of this number gets, where the number decides it.

    A kind that chooses by the answers has no such number. Then the result is a task of its list, for who needs any.

    Example:
        >>> [task_index(SequentialSelection(), group) for group in range(4)]
        [0, 1, 2, 3]
        >>> dealt = [task_index(EpochsSelection(tasks=3), group, seed=7) for group in range(6)]
        >>> sorted(dealt[:3]), sorted(dealt[3:])
        ([0, 1, 2], [0, 1, 2])
    """
    match selection:
        case SequentialSelection() | PopulationSelection():
            return group
        case EpochsSelection(tasks=tasks) | ChosenSelection(tasks=tasks):
            epoch, place = divmod(group, tasks)
            return _order(tasks, epoch, seed)[place]
        case _:
            assert_never(selection)


@lru_cache(maxsize=8)
def _order(tasks: int, epoch: int, seed: int) -> tuple[int, ...]:
    """Return the order of an epoch. Groups of few epochs are under way at a time, so few orders are kept."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(tasks).tolist())


class Answer(NamedTuple):
    """What counts of a trajectory of a task."""

    return_: float
    correct: bool | None = None
    """Whether the environment says that it is right; None: it does not say, and a return above 0 is right."""

    @property
    def right(self) -> bool:
        """Whether it is a success."""
        return is_right(self.return_, self.correct)


LARGEST = 1e100
"""Largest size of a return that is told from larger ones."""


class TaskStats:
    """What the answers to each task of a list show, [tasks] each. A group counts when it is trained or dropped.

    So a group that a checkpoint does not cover, and that the broker delivers again, is not counted twice. An answer
    counts ``0.5 ** (n / half_life)`` once n further answers to its task have come.

    Example:
        >>> stats = TaskStats(tasks=2, half_life=4)
        >>> stats.deal(1); stats.add(1, 0, [Answer(1.0), Answer(0.0), Answer(0.0), Answer(0.0)])
        >>> stats.attempts.tolist(), stats.rate.tolist(), round(float(stats.value[1]), 4)
        ([0.0, 4.0], [0.5, 0.3333333333333333], 0.3248)
    """

    # What is saved of each task.
    _SAVED = ("attempts", "right", "total", "squares", "value", "dealt", "ever", "failed", "last")

    def __init__(self, tasks: int, half_life: float = 16.0) -> None:
        self.tasks, self._decay = tasks, 0.5 ** (1 / half_life)
        self.attempts = np.zeros(tasks)
        """Answers, decayed."""
        self.right = np.zeros(tasks)
        """Successes among them, decayed."""
        self.total, self.squares = np.zeros(tasks), np.zeros(tasks)
        """Sums of returns and of their squares, decayed."""
        self.value = np.zeros(tasks)
        """(max - mean) std of the returns of the last group."""
        self.dealt = np.zeros(tasks, np.int64)
        """Groups that were dealt."""
        self.ever = np.zeros(tasks, np.int64)
        """Groups that ended with a success."""
        self.failed = np.zeros(tasks, np.bool_)
        """True if the last group had no success."""
        self.last = np.full(tasks, -1, np.int64)
        """Number of the last group that ended; -1: none."""
        self.recent: deque[int] = deque(maxlen=tasks)
        """Tasks of the groups that were dealt last, as many as the list has tasks."""
        self.groups, self.informative = 0, 0
        """Groups that ended since the last `gauges`, and those of them with different returns."""

    def deal(self, task: int) -> None:
        """Count a group that is dealt."""
        if task < self.tasks:
            self.dealt[task] += 1
            self.recent.append(task)

    def uses(self, task: int) -> int:
        """Return how often a task is among the last groups, with one that is about to be dealt."""
        window = list(self.recent)[max(0, len(self.recent) + 1 - self.tasks) :]
        return 1 + window.count(task)

    def add(self, task: int, group: int, answers: Sequence[Answer]) -> None:
        """Count the answers of a group, or of a member of it, that is trained or dropped.

        Args:
            task: number of the task; one beyond the list, of a run with other settings, is left out.
            group: number of the group.
            answers: those that did not fail for a fault of the environment.
        """
        if not answers or task >= self.tasks:
            return
        # An environment may send any finite number, and a choice by what overflows would end the learner.
        returns = np.clip([answer.return_ for answer in answers], -LARGEST, LARGEST)
        rights, fade = sum(answer.right for answer in answers), self._decay ** len(answers)
        columns = (self.attempts, self.right, self.total, self.squares)
        news = (len(answers), rights, returns.sum(), (returns**2).sum())
        for column, new in zip(columns, news, strict=True):
            column[task] = fade * column[task] + new
        self.value[task] = (returns.max() - returns.mean()) * returns.std()
        self.ever[task] += rights > 0
        self.failed[task] = not rights
        self.last[task] = max(self.last[task], group)
        self.groups += 1
        self.informative += bool(np.ptp(returns) > 0)

    @property
    def rate(self) -> Float64s:
        """Success rate by a prior of one success and one failure, [tasks]: 0.5 for a task without answers."""
        rate: Float64s = (self.right + 1) / (self.attempts + 2)
        return rate

    @property
    def solved(self) -> Float64s:
        """Share of successes, [tasks]; 0 for a task without answers."""
        share: Float64s = self.right / np.maximum(self.attempts, 1e-12)
        return share

    def gauges(self) -> dict[str, float]:
        """Return the metrics `selection/...` of a learner step."""
        known, solved = self.attempts > 0, self.solved
        groups, informative = self.groups, self.informative
        self.groups = self.informative = 0
        shares = {
            "unknown": ~known,
            "never": known & (self.right == 0),
            "below_half": known & (self.right > 0) & (solved < 0.5),
            "above_half": known & (solved >= 0.5) & (self.right < self.attempts),
            "always": known & (self.right >= self.attempts),
            "failed": self.failed,
        }
        rows = {f"selection/{name}_share": float(mask.mean()) for name, mask in shares.items()}
        return rows | ({"selection/informative_share": informative / groups} if groups else {})

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint: the tasks that were dealt or answered."""
        rows = np.flatnonzero((self.dealt > 0) | (self.attempts > 0))
        columns = {name: getattr(self, name)[rows].tolist() for name in self._SAVED}
        return {"rows": rows.tolist(), "recent": list(self.recent), **columns}

    @classmethod
    def restored(cls, tasks: int, half_life: float, state: Mapping[str, Any]) -> "TaskStats":
        """Return the stats of a checkpoint; tasks that the list no longer has are left out."""
        stats = cls(tasks, half_life)
        rows = np.array(state["rows"], np.int64)
        kept = rows < tasks
        for name in cls._SAVED:
            column = getattr(stats, name)
            column[rows[kept]] = np.array(state[name], column.dtype)[kept]
        stats.recent.extend(task for task in state["recent"] if task < tasks)
        return stats


def choose(
    config: ChosenSelection, stats: TaskStats, rng: np.random.Generator, busy: Collection[int] = ()
) -> int:
    """Return the number of the task of the next group.

    Args:
        config: kind of the selection.
        stats: what the answers so far show.
        rng: generator that depends on the seed of the run and on the number of the group alone.
        busy: tasks whose groups are under way; they are taken only if nothing else is left.

    Example:
        >>> stats = TaskStats(tasks=3)
        >>> for task, right in enumerate((0, 2, 4)):
        ...     stats.deal(task); stats.add(task, task, [Answer(float(i < right)) for i in range(4)])
        >>> choose(NearSelection(tasks=3, explore=0.0), stats, np.random.default_rng([0, 3]))
        1
    """
    free = np.ones(stats.tasks, np.bool_)
    free[[task for task in busy if task < stats.tasks]] = False
    match config:
        case NearSelection():
            if rng.random() < config.explore:
                return _least_dealt(stats, _some(free), rng)
            return _drawn(near_weights(stats.rate, _some(free), config.target, config.temperature), rng)
        case FailuresSelection():
            waiting = free & stats.failed
            if waiting.any() and rng.random() < config.again:
                return _first_of(stats.last, waiting, rng)
            return _least_dealt(stats, _some(free & ~stats.failed, free), rng)
        case PruneSelection() | FilterSelection():
            # A task whose only group was lost is as unknown as before: nothing of it is under way.
            kept = ~left_out(config, stats) | (free & (stats.last < 0))
            return _least_dealt(stats, _some(free & kept, kept, free), rng)
        case ValueSelection():
            fresh = free & (stats.dealt == 0)
            weights = np.where(free, stats.value, 0.0)
            if fresh.any() or not weights.any() or rng.random() < config.explore:
                return _least_dealt(stats, _some(fresh, free), rng)
            return _drawn(weights / weights.sum(), rng)
        case _:
            raise TypeError(f"selection of kind {config!r} chooses nothing")


def left_out(config: PruneSelection | FilterSelection, stats: TaskStats) -> Mask:
    """Return the tasks that are dealt only if nothing else is left, [tasks].

    Example:
        >>> stats = TaskStats(tasks=2)
        >>> stats.add(1, 0, [Answer(1.0)] * 4)
        >>> left_out(PruneSelection(tasks=2), stats).tolist()
        [False, True]
    """
    if isinstance(config, PruneSelection):
        out: Mask = (stats.attempts > 0) & (stats.solved >= config.solved)
    else:
        out = (stats.dealt >= config.passes) & (stats.ever == 0)
    return out


def near_weights(rates: Float64s, free: Mask, target: float, temperature: float) -> Float64s:
    """Return the probability of each task, softmax of -|p - target| / temperature over the free ones, [tasks].

    The formula is that of DOTS (arXiv:2506.05316, section 3).

    Example:
        >>> near_weights(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), np.ones(5, bool), 0.5, 1e-3).tolist()[2]
        1.0
    """
    distance = np.where(free, np.abs(rates - target), np.inf)
    with np.errstate(over="ignore"):
        weights: Float64s = np.exp(-(distance - distance.min()) / temperature)
    weights /= weights.sum()
    return weights


def _some(*masks: Mask) -> Mask:
    """Return the first mask that has a task, or else all tasks."""
    return next((mask for mask in masks if mask.any()), np.ones_like(masks[0]))


def _drawn(weights: Float64s, rng: np.random.Generator) -> int:
    return int(rng.choice(len(weights), p=weights))


def _least_dealt(stats: TaskStats, among: Mask, rng: np.random.Generator) -> int:
    """Return a task that was dealt least. So a list is dealt in epochs, each in an order of its own."""
    return _first_of(stats.dealt, among, rng)


def _first_of(column: NDArray[np.int64], among: Mask, rng: np.random.Generator) -> int:
    """Return one of the tasks of the mask that are lowest in a column."""
    places = np.flatnonzero(among)
    lowest = places[column[places] == column[places].min()]
    return int(lowest[rng.integers(len(lowest))])


def repeated_share(prompts: Iterable[str], groups: int) -> float:
    """Return the share of prompts that one of the last ``groups`` prompts before them equals.

    Example:
        >>> repeated_share(["a", "b", "a", "c", "b"], groups=2)
        0.2
    """
    last: deque[str] = deque(maxlen=groups)
    repeated, total = 0, 0
    for prompt in prompts:
        repeated += prompt in last
        total += 1
        last.append(prompt)
    return repeated / max(1, total)
