"""Assignment of trajectories to mini-batches, micro-batches and ranks, by pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.arrays import Int64s


@dataclass(frozen=True)
class CutRule:
    """Rule for cutting rows into micro-batches."""

    cost: int
    """Fixed price of one more micro-batch, in positions. It pays for many small operators, and for reading
    weights and adding gradients once more."""
    least_cost: int
    """Lower limit of the price, which is halved while there is more padding than `MOST_PADDING`."""


MOST_PADDING = 0.045
"""Share of padding in the computed positions above which the price of a micro-batch is lowered."""
ON_CPU = CutRule(cost=64, least_cost=16)
"""Rule on a CPU. Measured prices with 1, 10 and 50 million parameters: 70 to 100 positions."""
ON_GPU = CutRule(cost=1024, least_cost=1024)
"""Rule on a GPU. The price is an estimate: launching the operators of a micro-batch takes as long as
computing about a thousand positions."""


def deal_mini_batches(trajectories: int, parts: int, seed: Sequence[int]) -> list[Int64s]:
    """Deal trajectories at random to mini-batches whose sizes differ by at most one. None is empty.

    Example:
        >>> [len(part) for part in deal_mini_batches(5, 2, seed=[0])]
        [3, 2]
        >>> deal_mini_batches(3, 1, seed=[0])[0].tolist()
        [0, 1, 2]
    """
    order = np.random.default_rng(list(seed)).permutation(trajectories)
    return [np.sort(order[part::parts]) for part in range(min(parts, trajectories))]


def choose_cuts(lengths: Sequence[int] | Int64s, budget: int, rule: CutRule) -> list[tuple[int, int]]:
    """Cut rows sorted by falling length into runs, each padded to its first row.

    Args:
        lengths: positions of each row, not rising.
        budget: largest number of positions of a run, padding included; a single row may be longer.
        rule: price of a run. The cuts are the cheapest at this price, which is lowered while there is much
            padding.

    Returns:
        Runs [start, end) in order.

    Example:
        >>> choose_cuts([100, 50, 50], budget=300, rule=CutRule(cost=150, least_cost=150))
        [(0, 3)]
        >>> choose_cuts([100, 50, 50], budget=300, rule=CutRule(cost=150, least_cost=5))
        [(0, 1), (1, 3)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    cost = rule.cost
    while True:
        cuts = cheapest_cuts(sizes, budget, cost)
        computed = sum(int(sizes[start]) * (end - start) for start, end in cuts)
        if (
            cost // 2 < max(1, rule.least_cost)
            or padding_fraction(int(sizes.sum()), computed) <= MOST_PADDING
        ):
            return cuts
        cost //= 2


def cheapest_cuts(lengths: Sequence[int] | Int64s, budget: int, cost: int) -> list[tuple[int, int]]:
    """Cut rows into runs as in `choose_cuts`, at the lowest total price.

    Args:
        lengths: positions of each row, not rising.
        budget: largest number of positions of a run, padding included; a single row may be longer.
        cost: price of one run, in positions.

    Returns:
        Runs [start, end) in order.

    Example:
        >>> cheapest_cuts([100, 10, 10, 9, 9], budget=200, cost=5)
        [(0, 1), (1, 5)]
        >>> cheapest_cuts([10, 10, 10], budget=20, cost=128)
        [(0, 2), (2, 3)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = len(sizes)
    # best[i] is the lowest price of row i and all rows after it.
    best = np.zeros(rows + 1)
    following = np.zeros(rows + 1, dtype=np.int64)
    for start in range(rows - 1, -1, -1):
        most = int(max(1, min(rows - start, budget // max(1, int(sizes[start])))))
        prices = np.arange(1, most + 1) * sizes[start] + cost + best[start + 1 : start + most + 1]
        # On a tie, take the longer run.
        choice = most - 1 - int(prices[::-1].argmin())
        best[start] = prices[choice]
        following[start] = start + choice + 1
    cuts, start = [], 0
    while start < rows:
        cuts.append((start, int(following[start])))
        start = int(following[start])
    return cuts


def padding_fraction(filled: int, computed: int) -> float:
    """Return the share of computed positions that were padding.

    Example:
        >>> padding_fraction(75, 100)
        0.25
    """
    return 1 - filled / computed if computed else 0.0


def dealt_row(order: Int64s, turn: int, rank: int, ranks: int) -> int | None:
    """Return the row that ``rank`` gets in this turn, or None if no row is left for it.

    The direction alternates, so that no rank always gets the longer row.
    """
    place = turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)
    return int(order[place]) if place < len(order) else None
