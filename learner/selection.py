"""Which task a rollout group gets: each task once, or a list of tasks again and again. Pure.

The task depends on the number of the group, the settings and the seed of the run alone. So a learner that is restarted
deals the same tasks again, and a checkpoint needs no more than the number of the next group.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import assert_never

import numpy as np

from learner.settings.selection import EpochsSelection, SelectionConfig, SequentialSelection


def task_index(selection: SelectionConfig, group: int, seed: int = 0) -> int:
    """Return the number of the task that a group of this number gets.

    Example:
        >>> [task_index(SequentialSelection(), group) for group in range(4)]
        [0, 1, 2, 3]
        >>> dealt = [task_index(EpochsSelection(tasks=3), group, seed=7) for group in range(6)]
        >>> sorted(dealt[:3]), sorted(dealt[3:])
        ([0, 1, 2], [0, 1, 2])
    """
    match selection:
        case SequentialSelection():
            return group
        case EpochsSelection(tasks=tasks):
            epoch, place = divmod(group, tasks)
            return _order(tasks, epoch, seed)[place]
        case _:
            assert_never(selection)


@lru_cache(maxsize=8)
def _order(tasks: int, epoch: int, seed: int) -> tuple[int, ...]:
    """Return the order of an epoch. Groups of few epochs are under way at a time, so few orders are kept."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(tasks).tolist())


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
