"""pass@k, and the interval of a mean over tasks. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
