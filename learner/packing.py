"""Which trajectories go into which mini-batch, micro-batch and rank. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MICRO_BATCH_COST = 128
"""Fixed price of one more micro-batch, in positions, when cuts are chosen."""


def deal_mini_batches(trajectories: int, parts: int, seed: Sequence[int]) -> list[Ints]:
    """Deal trajectories at random to mini-batches of equal size, give or take one; no empty ones.

    Example:
        >>> [len(part) for part in deal_mini_batches(5, 2, seed=[0])]
        [3, 2]
        >>> deal_mini_batches(3, 1, seed=[0])[0].tolist()
        [0, 1, 2]
    """
    order = np.random.default_rng(list(seed)).permutation(trajectories)
    return [np.sort(order[part::parts]) for part in range(min(parts, trajectories))]


def choose_cuts(
    lengths: Sequence[int] | Ints, budget: int, cost: int = MICRO_BATCH_COST
) -> list[tuple[int, int]]:
    """Cut rows sorted by falling length into runs, each padded to its first row, at the least price.

    Args:
        lengths: positions of each row, not rising.
        budget: most positions of a run, padding included; a single row may be longer.
        cost: price of one run, in positions.

    Returns:
        Runs [start, end) in order.

    Example:
        >>> choose_cuts([100, 10, 10, 9, 9], budget=200, cost=5)
        [(0, 1), (1, 5)]
        >>> choose_cuts([10, 10, 10], budget=20)
        [(0, 2), (2, 3)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = len(sizes)
    best = np.zeros(rows + 1)  # best[i]: least price of rows i and after
    following = np.zeros(rows + 1, dtype=np.int64)
    for start in range(rows - 1, -1, -1):
        most = int(max(1, min(rows - start, budget // max(1, int(sizes[start])))))
        prices = np.arange(1, most + 1) * sizes[start] + cost + best[start + 1 : start + most + 1]
        choice = most - 1 - int(prices[::-1].argmin())  # on a tie the longer run
        best[start] = prices[choice]
        following[start] = start + choice + 1
    cuts, start = [], 0
    while start < rows:
        cuts.append((start, int(following[start])))
        start = int(following[start])
    return cuts


def padding_fraction(filled: int, computed: int) -> float:
    """Share of computed positions that were padding.

    Example:
        >>> padding_fraction(75, 100)
        0.25
    """
    return 1 - filled / computed if computed else 0.0


def dealt_row(order: Ints, turn: int, rank: int, ranks: int) -> int | None:
    """Row that ``rank`` gets in this turn; the direction alternates, so that none always gets the longer."""
    place = turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)
    return int(order[place]) if place < len(order) else None
