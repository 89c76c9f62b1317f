"""Value targets of the critic, and its loss.

Targets are computed in numpy and float64, one trajectory at a time. The loss is computed in torch.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from learner.algorithms.tokens import check_same_shape
from protocol.arrays import Float64s


class VTrace(NamedTuple):
    """Off-policy corrected value targets, and the advantages that follow from them."""

    targets: Float64s
    advantages: Float64s
    """Advantages times the truncated ratio rho. Unlike ``targets - values`` they use the next target."""


def value_loss(
    values: Tensor, targets: Tensor, values_before: Tensor | None, *, clip_low: float, clip_high: float
) -> Tensor:
    r"""Compute the squared error of values whose movement in one update is bounded.

    .. math::
        \tfrac12 \max\left( (V - R)^2,
        (\mathrm{clip}(V, V_b - \epsilon_{low}, V_b + \epsilon_{high}) - R)^2 \right)

    This is PPO's value clipping with two bounds, as in T-PPO (0.5 and 0.6 there; arXiv:2506.15050). The
    larger error counts. A value that left the range away from its target still gets gradient; a value that
    left it towards its target gets none.

    Args:
        values: [N], float32, with gradient.
        targets: [N], in the unit of the values; constant.
        values_before: [N], values when the tokens were first seen; constant. None means no clipping.
        clip_low, clip_high: how far down and up, >= 0, in the unit of the values.

    Returns:
        Loss per token [N], >= 0, not averaged. Gradient in ``values`` only.

    Raises:
        ValueError: a bound is negative, or the shapes differ.

    Example:
        >>> one = torch.tensor([1.0])
        >>> value_loss(one, one * 2, one * 0, clip_low=0.5, clip_high=0.5).tolist()  # (0.5 - 2)^2 / 2
        [1.125]
        >>> value_loss(one, one * 2, None, clip_low=0.5, clip_high=0.5).tolist()
        [0.5]
    """
    check_same_shape(values=values, targets=targets, values_before=values_before)
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip bounds {clip_low} and {clip_high}: distances, not negative")
    targets = targets.detach()
    error = (values - targets).square()
    if values_before is not None:
        before = values_before.detach()
        near = torch.clamp(values, before - clip_low, before + clip_high)
        clipped = (near - targets).square()
        # `maximum` would halve the gradient where both errors are equal.
        error = torch.where(clipped > error, clipped, error)
    return 0.5 * error


def rate_loss(logits: Tensor, rates: Tensor) -> Tensor:
    r"""Compute the cross-entropy of rates of success and the probabilities that a critic gives.

    .. math:: -\left(y \log V + (1 - y) \log (1 - V)\right), \qquad V = \frac{1}{1 + e^{-z}}

    DAPO, arXiv:2412.18279: its critic learns the share of right answers among continuations of a step. The gradient in
    z is V - y, so that the loss is least, and not 0 unless y is 0 or 1, where V is y.

    Args:
        logits: z, [N], float32, with gradient.
        rates: y, [N], from 0 to 1; constant.

    Returns:
        Loss per token [N], in nats, >= 0, not averaged. Gradient in ``logits`` only.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> rate_loss(torch.zeros(2), torch.tensor([1.0, 0.5])).mul(1000).round().tolist()  # log 2
        [693.0, 693.0]
    """
    check_same_shape(logits=logits, rates=rates)
    return binary_cross_entropy_with_logits(logits, rates.detach(), reduction="none")


def lambda_returns(advantage: ArrayLike, values: ArrayLike) -> Float64s:
    r"""Return the value targets that belong to advantages by GAE: :math:`R_t = A_t + V_t`.

    This is the lambda-return of arXiv:1506.02438, section 3, with the lambda and the discount of the
    advantages. Lambda 1 on a finished trajectory gives `learner.algorithms.advantages.monte_carlo_returns`.

    Args:
        advantage: [T], before any whitening or clipping.
        values: [T], values that the advantages were computed from.

    Returns:
        Targets [T], float64.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> lambda_returns([0.5, -0.25], [1.0, 1.0]).tolist()
        [1.5, 0.75]
    """
    advantage, values = np.asarray(advantage, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if advantage.shape != values.shape:
        raise ValueError(
            f"advantages {advantage.shape} and values {values.shape}: give one of each per token"
        )
    targets: Float64s = advantage + values
    return targets


def vtrace_targets(
    rewards: ArrayLike,
    values: ArrayLike,
    ratios: ArrayLike,
    *,
    bootstrap: float,
    discount: float,
    ceiling_rho: float = 1.0,
    ceiling_c: float = 1.0,
    trace: float = 1.0,
) -> VTrace:
    r"""Compute V-trace: value targets for a policy other than the behaviour policy.

    .. math::
        v_s &= V_s + \sum_{t \ge s} \gamma^{t-s} \Big(\prod_{i=s}^{t-1} c_i\Big)
        \rho_t (r_t + \gamma V_{t+1} - V_t) \\
        \rho_t &= \min(\bar\rho, w_t), \qquad c_t = \lambda \min(\bar c, w_t) \\
        A_t &= \rho_t (r_t + \gamma v_{t+1} - V_t)

    IMPALA, arXiv:1802.01561, section 4.1, equation 1, with the lambda of its remark 2; the advantages are
    from section 4.2. The ceiling of rho decides which policy's value is learned (1: a policy between the
    two). The ceiling of c decides only how fast. With all ratios 1 the targets are lambda-returns, V + GAE.

    Args:
        rewards, values: [T], reward of each of successive action tokens, and value before it.
        ratios: w, [T], >= 0: target policy / behaviour policy.
        bootstrap: value after the last token; 0 where the trajectory ended.
        discount: gamma, [0, 1].
        ceiling_rho, ceiling_c: > 0; ``ceiling_rho`` must not be below ``ceiling_c``, as the paper requires.
        trace: lambda, [0, 1].

    Returns:
        Targets and advantages, [T] each, float64.

    Raises:
        ValueError: the shapes differ, a ratio is negative or not finite, or the ceilings are in the wrong
            order.

    Example:
        >>> vtrace_targets([0.0, 1.0], [0.5, 0.5], [1.0, 0.5], bootstrap=0.0, discount=1.0).targets.tolist()
        [0.75, 0.75]
    """
    rewards, values, ratios = (np.asarray(x, dtype=np.float64) for x in (rewards, values, ratios))
    if rewards.ndim != 1 or not rewards.shape == values.shape == ratios.shape:
        raise ValueError(
            f"rewards {rewards.shape}, values {values.shape}, ratios {ratios.shape}: one per token each"
        )
    if not (np.isfinite(ratios) & (ratios >= 0)).all():
        raise ValueError(
            f"ratios from {ratios.min()} to {ratios.max()}: exp of held log ratios is finite, not negative"
        )
    if not 0 < ceiling_c <= ceiling_rho:
        raise ValueError(f"ceilings rho {ceiling_rho}, c {ceiling_c}: need 0 < c <= rho")
    rho, c = np.minimum(ceiling_rho, ratios), trace * np.minimum(ceiling_c, ratios)
    deltas = rho * (rewards + discount * np.append(values[1:], bootstrap) - values)
    excess, running = np.zeros_like(values), 0.0
    for t in reversed(range(len(values))):
        running = deltas[t] + discount * c[t] * running
        excess[t] = running
    targets = values + excess
    return VTrace(targets, rho * (rewards + discount * np.append(targets[1:], bootstrap) - values))


def explained_variance(targets: ArrayLike, values: ArrayLike) -> float:
    r"""Return how much of the targets' variance the values explain: :math:`1 - Var(R - V) / Var(R)`.

    1 is perfect, 0 is as good as a constant, and below 0 is worse than a constant. An offset common to all
    values does not count against them.

    Args:
        targets, values: [M].

    Returns:
        A number of at most 1; NaN where all targets are equal, or there are none.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> explained_variance([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
        1.0
        >>> explained_variance([1.0, 1.0], [0.0, 1.0])
        nan
    """
    targets, values = np.asarray(targets, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if targets.shape != values.shape:
        raise ValueError(f"targets {targets.shape} and values {values.shape}: give one of each per token")
    if not targets.size or np.ptp(targets) == 0:
        return float("nan")
    return float(1 - np.var(targets - values) / np.var(targets))
