"""Weights that correct tokens of the behaviour policy towards the proximal policy, and where they were cut.

The argument is always the ratio proximal / behaviour: of a token, or of its turn or sequence
(`learner.algorithms.ratios.level_ratio`), of its whole trajectory as a product
(`learner.algorithms.ratios.product_ratio`), or of its rollout group (`learner.algorithms.ratios.segment_ratio`).
Corrections multiply. Two intervals, one at level sequence and one at level token, neither keeping the weight,
form the mask of HisPO (arXiv:2603.21065, equations 8 and 9).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class CorrectionValue(NamedTuple):
    """Weight of each token, and where it was cut, [N] each, without gradient."""

    weight: Tensor
    cut: Tensor
    """Bool: True where the weight was truncated, or the token rejected."""


def truncated_correction(ratio: Tensor, *, ceiling: float) -> CorrectionValue:
    r"""Truncate importance weights at a ceiling.

    .. math:: w_t = \min(c, \pi_\mathrm{prox}(a_t|s_t) / \mu(a_t|s_t))

    This is :math:`\bar\rho_t` of IMPALA (arXiv:1802.01561, section 4.1). It lowers the variance, at the cost
    of a bias that grows with the share of tokens at the ceiling. With equal policies and c >= 1 the weight
    is 1.

    Args:
        ratio: proximal / behaviour [N], > 0.
        ceiling: c > 0.

    Returns:
        (weights [N] in (0, ceiling], truncated bool [N]).

    Raises:
        ValueError: the ceiling is not positive.

    Example:
        >>> truncated_correction(torch.tensor([0.5, 4.0]), ceiling=2.0)
        CorrectionValue(weight=tensor([0.5000, 2.0000]), cut=tensor([False,  True]))
    """
    if ceiling <= 0:
        raise ValueError(f"ceiling must be > 0, got {ceiling}")
    ratio = ratio.detach()
    return CorrectionValue(ratio.clamp(max=ceiling), ratio > ceiling)


def interval_correction(ratio: Tensor, *, low: float, high: float, keep_weight: bool) -> CorrectionValue:
    r"""Reject tokens whose policies disagree too much: they get no gradient at all.

    .. math:: w_t = k_t \text{ if } l \le r_t \le h \text{ else } 0, \quad k_t = r_t \text{ or } 1

    At token level this is IcePop of Ring-1T (arXiv:2510.18855), which keeps the ratio as weight. With the
    ratio of the sequence it rejects whole trajectories. With the ratio of the turn it is the mismatch mask of
    IPA (arXiv:2512.24873; low = 0, no weight). HisPO (arXiv:2603.21065) writes ``|r - 1| < δ``: low = 1 - δ,
    high = 1 + δ, no weight. Here the ends belong to the interval, which makes no practical difference.

    The mean over tokens still counts rejected tokens in its denominator.

    Args:
        ratio: proximal / behaviour [N], > 0; of a token, or equal within its turn or sequence.
        low, high: the interval, 0 <= low <= high.
        keep_weight: if True, the weight inside the interval is the ratio; if False, it is 1.

    Returns:
        (weights [N], rejected bool [N]). The weight of a rejected token is 0. A ratio that is not a number is
        rejected.

    Raises:
        ValueError: the interval is empty or begins below 0.

    Example:
        >>> interval_correction(torch.tensor([0.25, 0.75, 4.0]), low=0.5, high=2.0, keep_weight=True)
        CorrectionValue(weight=tensor([0.0000, 0.7500, 0.0000]), cut=tensor([ True, False,  True]))
    """
    if not 0 <= low <= high:
        raise ValueError(f"needs 0 <= low <= high, got low {low}, high {high}")
    ratio = ratio.detach()
    inside = (ratio >= low) & (ratio <= high)
    kept = ratio if keep_weight else torch.ones_like(ratio)
    return CorrectionValue(torch.where(inside, kept, 0), ~inside)
