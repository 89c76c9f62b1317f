"""Risk measures of bundles of tasks: RiskPO (arXiv:2510.00911). Pure, in numpy and float64."""

import numpy as np
from numpy.typing import ArrayLike

from protocol.arrays import Float64s


def risk_advantage(
    scores: ArrayLike,
    *,
    quantiles: tuple[float, float],
    levels: tuple[float, float],
    mix: float,
    natural_baseline: bool = False,
) -> Float64s:
    r"""Compute the advantage of scores that counts the lower tail and the middle of their distribution.

    .. math::
        A_\mathrm{RVaR} &= \frac{(S - q_d)_+ - (S - q_u)_+ \; (+\, q_d - q_u)}{\alpha_u - \alpha_d}, \qquad
        A_\mathrm{CVaR} = -\frac{(q_d - S)_+}{\alpha_d} \\
        A &= \frac{\omega A_\mathrm{CVaR} + A_\mathrm{RVaR}}{\omega + 1}

    RiskPO, arXiv:2510.00911, as in the released program. Scores above the upper quantile gain nothing more.

    Args:
        scores: S [M], sums of rewards of a bundle.
        quantiles: q_d and q_u, running quantiles of the scores.
        levels: alpha_d and alpha_u, 0 < alpha_d < alpha_u <= 1.
        mix: omega, weight of the lower tail, >= 0.
        natural_baseline: whether q_d - q_u is added, so that no score has a positive advantage.

    Returns:
        Advantages [M], in the unit of the scores.

    Example:
        >>> one = {"quantiles": (1.0, 3.0), "levels": (0.2, 0.8), "mix": 1.5}
        >>> risk_advantage([0, 1, 2, 3, 5], **one).round(4).tolist()
        [-3.0, 0.0, 0.6667, 1.3333, 1.3333]
    """
    values = np.asarray(scores, dtype=np.float64)
    (low, high), (lower, upper) = quantiles, levels
    middle = np.maximum(values - low, 0) - np.maximum(values - high, 0)
    if natural_baseline:
        middle = middle + low - high
    tail = -np.maximum(low - values, 0) / lower
    result: Float64s = (mix * tail + middle / (upper - lower)) / (mix + 1)
    return result


def next_quantile(quantile: float, scores: ArrayLike, *, level: float, rate: float) -> float:
    r"""Return a running quantile after one more batch of scores.

    .. math:: q \leftarrow q + \eta \, (\alpha - P(S < q))

    It rests where the share of scores below it is alpha (RiskPO, arXiv:2510.00911; eta = 0.1).

    Example:
        >>> next_quantile(1.0, [0, 2, 2, 2], level=0.5, rate=0.1), next_quantile(1.0, [0, 2], level=0.5, rate=0.1)
        (1.025, 1.0)
    """
    values = np.asarray(scores, dtype=np.float64)
    return float(quantile + rate * (level - float((values < quantile).mean())))


def share_of_paper(differences: ArrayLike) -> Float64s:
    r"""Return the share of a paper's advantage that each of its tasks gets; the shares add up to 1.

    .. math:: \frac{r_i - \bar r_i}{\sum_i (r_i - \bar r_i)}

    RiskPO's "sum-mean", arXiv:2510.00911. Where the differences add up to 0, all shares are equal, which is ours.

    Args:
        differences: [Q], reward of each task of the paper minus the mean reward of the task's group.

    Example:
        >>> share_of_paper([0.5, -0.25, 0.25]).tolist(), share_of_paper([0.5, -0.5]).tolist()
        ([1.0, -0.5, 0.5], [0.5, 0.5])
    """
    values = np.asarray(differences, dtype=np.float64)
    total = float(values.sum())
    shares: Float64s = np.full(len(values), 1 / max(1, len(values))) if abs(total) < 1e-6 else values / total
    return shares
