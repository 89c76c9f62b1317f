"""Paired differences, their intervals, and what they say about a claim.

The seeds of two arms are paired: both begin from the same weights and get the same tasks. A claim holds if, on at least
`ENOUGH_SEEDS` pairs, the median of the difference reaches the bar and the 95 % interval of its mean lies above 0. With
fewer pairs nothing is decided, however large the difference is.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.claims.cells import Cell, value_of
from benchmarks.claims.claims import Bar, Claim

ENOUGH_SEEDS = 5
"""Pairs that decide a claim."""
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Quantile 0.975 of Student's t distribution for 1, 2, ... degrees of freedom. The last one serves all beyond."""

Verdict = Literal["holds", "did not help here", "not decided", "not measured"]


@dataclass(frozen=True)
class Difference:
    """Paired differences of two arms in one measure; above 0 the arm is better than the baseline."""

    values: tuple[float, ...]
    """One difference for each seed that both arms have, in the order of seeds."""
    own: tuple[float, ...] = ()
    """What the arm itself has with each seed."""
    baseline: tuple[float, ...] = ()
    """What the baseline has with each seed."""

    @property
    def median(self) -> float:
        """Median over seeds. Without a seed there is none, and asking raises StatisticsError."""
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean difference by Student's t; with one pair it has no end.

        Example:
            >>> low, high = Difference((0.1, 0.2, 0.3)).interval
            >>> round(low, 3), round(high, 3)
            (-0.048, 0.448)
        """
        n = len(self.values)
        if n < 2:
            return (-math.inf, math.inf)
        half = T_975[min(n - 2, len(T_975) - 1)] * statistics.stdev(self.values) / math.sqrt(n)
        mean = statistics.fmean(self.values)
        return (mean - half, mean + half)


def difference(bar: Bar, treated: Mapping[int, Cell], baseline: Mapping[int, Cell]) -> Difference:
    """Return the paired differences of two arms, whose runs are given by seed.

    Of "calls" it is the share that the arm saves, 1 - arm / baseline.
    """
    pairs = [(treated[seed], baseline[seed]) for seed in sorted(treated.keys() & baseline.keys())]
    own = tuple(value_of(a, bar.measure) for a, _ in pairs)
    theirs = tuple(value_of(b, bar.measure) for _, b in pairs)
    values = zip(own, theirs, strict=True)
    if bar.measure == "calls":
        # A baseline without calls leaves nothing to save.
        return Difference(tuple(1.0 - a / b if b > 0 else 0.0 for a, b in values), own, theirs)
    return Difference(tuple(a - b for a, b in values), own, theirs)


def passes(bar: Bar, found: Difference) -> bool:
    """Return whether a difference reaches a bar.

    Example:
        >>> bar = Bar("final", "grpo", 0.1)
        >>> passes(bar, Difference((0.2, 0.2, 0.3))), passes(bar, Difference((0.2, 0.2, -0.3)))
        (True, False)
    """
    if bar.reach is not None and statistics.median(found.own) < bar.reach:
        return False
    if bar.below is not None and statistics.median(found.baseline) >= bar.below:
        return False
    return found.median >= bar.least and (not bar.better or found.interval[0] > 0)


def verdict(claim: Claim, found: Sequence[Difference]) -> Verdict:
    """Return the verdict on a claim from the differences of its bars.

    Example:
        >>> claim = Claim("X", "x", "", (Bar("final", "grpo", 0.1),), "")
        >>> [verdict(claim, [Difference((0.2,) * n)]) for n in (0, 2, 5)]
        ['not measured', 'not decided', 'holds']
    """
    pairs = min(len(one.values) for one in found)
    if pairs == 0:
        return "not measured"
    if pairs < ENOUGH_SEEDS:
        return "not decided"
    held = all(passes(bar, one) for bar, one in zip(claim.bars, found, strict=True))
    return "holds" if held else "did not help here"
