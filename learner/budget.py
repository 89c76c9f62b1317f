"""How many answers the next group of each task gets, by what its answers so far show. Pure.

Answers are shared out one by one, each to the task that gains most from one more. On 48 independent tasks, at equal
answers, both rules ended below groups of equal size: 0.902 by uncertainty, 0.631 by value and 0.864 with a cap of 16,
against 0.948. So they are options, not recommendations.
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from learner.formulas import load_formula
from learner.selection import TaskStats
from learner.settings.budget import OwnPrediction, SharedBudget, UncertaintyBudget, ValueBudget
from protocol.arrays import Float64s

PRIOR = 2
"""Answers that the prior of one success and one failure counts as."""


def group_sizes(config: SharedBudget, stats: TaskStats, group_size: int) -> NDArray[np.int64]:
    """Return the members of the next group of each task, [tasks]; they add up to ``tasks * group_size``.

    Raises:
        FormulaError: a prediction of the user's own is not one probability for each task.
    """
    rates = stats.rate if config.predict is None else predicted(config.predict, stats)
    steps = np.arange(config.smallest, config.largest)
    match config:
        case UncertaintyBudget():
            gains = uncertainty_gains(config, rates, stats.attempts, steps, spent=stats.attempts.sum())
        case ValueBudget():
            gains = value_gains(rates, steps)
        case _:
            raise TypeError(f"{config!r} shares nothing out")
    return config.smallest + shared_out(gains, stats.tasks * (group_size - config.smallest))


def predicted(own: OwnPrediction, stats: TaskStats) -> Float64s:
    """Return what a function of the user's own says of each task, [tasks].

    Raises:
        FormulaError: it raised an exception, or returned something else than probabilities.
    """
    formula = load_formula(own, "learner.budget.predict")
    try:
        rates: Float64s = np.asarray(formula(stats), dtype=np.float64)
    except (TypeError, ValueError):
        raise formula.refused("did not return an array of numbers") from None
    if rates.shape != (stats.tasks,) or not ((rates >= 0) & (rates <= 1)).all():
        raise formula.refused(
            f"returned an array of shape {rates.shape}; return one probability, 0 to 1, for each of the "
            f"{stats.tasks} tasks"
        )
    return rates


def uncertainty_gains(
    config: UncertaintyBudget, rates: Float64s, attempts: Float64s, steps: NDArray[np.int64], *, spent: float
) -> Float64s:
    """Return what one more member is worth to a task that has ``steps`` of them, [tasks, K].

    ``h(n) - h(n + 1) + explore * sqrt(log(1 + T) / n)``, ``h(n) = t[1 - alpha / 2, n - 1] * s / sqrt(n)``: XRPO
    (arXiv:2510.06672). n counts earlier answers, the group's members and the two of the prior. As printed, s is the
    deviation of the answers, which is 0 for a task without a success; here ``s^2 = p (1 - p)``, with the prior.

    Args:
        rates: success rate p of each task.
        attempts: answers so far, decayed.
        steps: members that a group has before the one that is added, [K].
        spent: answers so far of all tasks, T.
    """
    n = np.rint(attempts[:, None]).astype(np.int64) + PRIOR + steps[None, :]
    half, s = t_quantiles(1 - config.alpha / 2, int(n.max())), np.sqrt(rates * (1 - rates))[:, None]
    width = half[n - 2] * s / np.sqrt(n) - half[n - 1] * s / np.sqrt(n + 1)
    gains: Float64s = width + config.explore * np.sqrt(math.log1p(spent) / n)
    return gains


def value_gains(rates: Float64s, steps: NDArray[np.int64]) -> Float64s:
    """Return by how much one more member raises the utility of a group of ``steps`` members, [tasks, K].

    The utility is ``B (1 - p) (1 - (1 - p)^(B - 1))`` (V_0, arXiv:2602.03584); the program of its authors has no rule.

    Example:
        >>> value_gains(np.array([0.1]), np.array([8])).round(3).tolist()
        [[0.857]]
    """
    gains: Float64s = utility(rates[:, None], steps[None, :] + 1) - utility(rates[:, None], steps[None, :])
    return gains


def utility(rates: Float64s, members: NDArray[np.int64]) -> Float64s:
    """Return V_0's utility of groups.

    Example:
        >>> utility(np.array([0.1, 0.5, 0.9]), np.array([8, 8, 8])).round(5).tolist()
        [3.75626, 3.96875, 0.8]
    """
    value: Float64s = members * (1 - rates) * (1 - (1 - rates) ** (members - 1))
    return value


def shared_out(gains: Float64s, budget: int) -> NDArray[np.int64]:
    """Return how many each task gets if each goes to the task that gains most from its next one, [tasks].

    A gain behind a smaller one is taken right after it, so it counts as the smallest one up to it.

    Example:
        >>> shared_out(np.array([[0.5, 0.4, 0.3], [0.1, 0.9, 0.9], [0.2, 0.0, 0.0]]), 4).tolist()
        [3, 0, 1]
    """
    key = np.minimum.accumulate(gains, axis=1).ravel()
    taken = np.argsort(-key, kind="stable")[: max(0, budget)]
    return np.bincount(taken // gains.shape[1], minlength=len(gains))


EXACT = 200
"""Degrees of freedom up to which the quantile is found in the distribution function, in a time that grows with them."""


def t_quantiles(probability: float, most: int) -> Float64s:
    r"""Return the quantiles of Student's t distribution with 1 to ``most`` degrees of freedom, [most].

    Beyond `EXACT` they are the first terms of a series in the quantile z of the normal distribution (Abramowitz and
    Stegun, 26.7.5), up to 1e-7 for probabilities up to 0.9995:

    .. math::
        t = z + \frac{z^3 + z}{4 \nu} + \frac{5 z^5 + 16 z^3 + 3 z}{96 \nu^2}
            + \frac{3 z^7 + 19 z^5 + 17 z^3 - 15 z}{384 \nu^3}

    Example:
        >>> t_quantiles(0.975, 1000)[[2, 199, 999]].round(4).tolist()
        [3.1824, 1.9719, 1.9623]
    """
    exact = np.array([t_quantile(probability, df) for df in range(1, min(most, EXACT) + 1)])
    z = NormalDist().inv_cdf(min(probability, 1 - 2.0**-53))
    df = np.arange(EXACT + 1, most + 1, dtype=np.float64)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return np.concatenate([exact, z + sum(term / df**power for power, term in enumerate(terms, start=1))])


@lru_cache(maxsize=4096)
def t_quantile(probability: float, df: int) -> float:
    """Return the quantile of Student's t distribution with a whole number of degrees of freedom, above 1/2.

    Example:
        >>> round(t_quantile(0.975, 3), 3), round(t_quantile(0.975, 4), 3), round(t_quantile(0.975, 1), 2)
        (3.182, 2.776, 12.71)
    """
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, df) < probability else (low, middle)
    return high


def _t_cdf(t: float, df: int) -> float:
    """Return the distribution function at t >= 0, by its finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = 0.0 if df == 1 else term
    for k in range(2 + odd, df - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + inside / 2
