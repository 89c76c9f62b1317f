"""Surrogate objectives that penalise the distance of a ratio instead of clipping it; see `surrogates`.

Advantages are constants for the gradient.
"""

import math

from torch import Tensor

from learner.algorithms.ratios import segment_sums
from learner.algorithms.surrogates import SurrogateValue, unclipped
from learner.algorithms.tokens import check_same_shape


def ratio_variance_surrogate(ratio: Tensor, advantage: Tensor, *, dual: float) -> SurrogateValue:
    r"""Penalise the distance of the ratio from 1 instead of clipping it.

    .. math:: r_t A_t - \lambda (r_t - 1)^2

    R2VPO (arXiv:2601.03320, 2605.26784): the Lagrangian of a bound on the variance of the ratio, with λ from
    `next_dual`. Stale tokens are pulled back towards their behaviour policy; none is left out. The objective
    of a token is largest at r = 1 + A / 2λ. At r = 1 the gradient equals the gradient of REINFORCE for every
    λ.

    Args:
        ratio: [N], > 0, with gradient; current / behaviour as published.
        advantage: [N].
        dual: λ >= 0.

    Returns:
        (objective [N], clipped: False everywhere).

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> ratio_variance_surrogate(torch.tensor([1.0, 2.0]), torch.ones(2), dual=0.5).value
        tensor([1.0000, 1.5000])
    """
    check_same_shape(ratio=ratio, advantage=advantage)
    return unclipped(ratio * advantage - dual * (ratio - 1).square())


def next_dual(
    dual: float, mean_square: float, *, bound: float, rate: float, ceiling: float = math.inf
) -> float:
    r"""Return the dual variable of `ratio_variance_surrogate` after a step.

    .. math:: \lambda \leftarrow \max(0, \lambda + \eta\,(\overline{(r-1)^2} - \delta))

    This is dual ascent in its usual form; the schedule of R2VPO (arXiv:2601.03320) is not published. λ falls
    slowly, by at most δη per step. One token at the limit of the log-ratio can raise the mean square into the
    thousands; without a ceiling, λ would then stay large for the rest of the run.

    Args:
        dual: λ >= 0.
        mean_square: mean of (ratio - 1)² over all tokens of the step, on all ranks.
        bound: δ > 0.
        rate: η >= 0, per step.
        ceiling: largest λ.

    Returns:
        λ in [0, ceiling]; larger than before if and only if mean_square > bound, up to the ceiling.

    Raises:
        ValueError: the mean square is NaN. The caller must skip such a step, because its penalty would be
            lost.

    Example:
        >>> import torch
        >>> next_dual(1.0, 0.25, bound=0.125, rate=2.0), next_dual(0.125, 0.0, bound=0.5, rate=1.0)
        (1.25, 0.0)
    """
    if math.isnan(mean_square):
        raise ValueError("mean square of ratio - 1 is not a number; skip this step")
    return min(max(0.0, dual + rate * (mean_square - bound)), ceiling)


def bounded_target(median_advantage: Tensor, *, low: float, high: float, temperature: float) -> Tensor:
    r"""Compute the ratio that gains most for a policy whose distance from its predecessor is bounded.

    .. math:: 1 - \epsilon_l + (\epsilon_l + \epsilon_h)\,\sigma(\tilde A_t / \tau)

    BPO and GBPO (arXiv:2604.18578). In the limit of low temperature, the target of an action better than the
    median is the upper bound, and the target of a worse action is the lower bound. At the median the target
    is 1 + (ε_h - ε_l)/2, so equal half widths pull the ratio back to 1.

    Args:
        median_advantage: return minus the *median* of its group, over the standard deviation [N].
        low, high: half widths around 1; 0.3 in the paper.
        temperature: τ > 0, in units of the advantage; the paper's runs use 1e-4.

    Returns:
        Targets [N] in [1 - low, 1 + high], without gradient.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> import torch
        >>> bounded_target(torch.tensor([-1.0, 0.0, 1.0]), low=0.25, high=0.5, temperature=1e-4)
        tensor([0.7500, 1.1250, 1.5000])
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    return 1 - low + (low + high) * (median_advantage.detach() / temperature).sigmoid()


def bounded_surrogate(ratio: Tensor, target: Tensor, weight: Tensor) -> SurrogateValue:
    r"""Penalise the distance of the ratio from its target.

    .. math:: -|r_t - r^*_t|\, w_t

    GBPO (arXiv:2604.18578), w = \|A\| with the usual group advantage. Inside the bounds the gradient equals
    the gradient of PPO. Outside, where PPO has none, it leads back.

    Args:
        ratio: [N], > 0, with gradient.
        target: from `bounded_target`, [N].
        weight: [N], >= 0.

    Returns:
        (objective [N] <= 0, clipped: False everywhere). At the target, value and gradient are 0.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> bounded_surrogate(torch.tensor([1.0, 1.5]), torch.tensor([1.25, 1.25]), torch.tensor([2.0, 2.0])).value
        tensor([-0.5000, -0.5000])
    """
    check_same_shape(ratio=ratio, target=target, weight=weight)
    return unclipped(-(ratio - target).abs() * weight)


def mirror_descent_surrogate(ratio: Tensor, advantage: Tensor, *, step_size: float) -> SurrogateValue:
    r"""Take a proximal step (mirror descent) instead of clipping.

    .. math:: r_t A_t - \tfrac{1}{t_k} (r_t \log r_t - r_t + 1)

    MDPO (arXiv:2005.09814), on-policy form. The bracket is never negative, and its mean over tokens of the
    proximal policy is an unbiased estimate of KL(current \|\| proximal). This direction of the KL makes it
    mirror descent: for a table the maximum is π ∝ π_prox exp(t A). At r = 1 the gradient of the bracket is
    zero, so it has an effect only with several updates per batch (10 in the paper).

    Args:
        ratio: current / proximal [N], > 0, with gradient.
        advantage: [N].
        step_size: t_k > 0, from `mirror_step_size`.

    Returns:
        (objective [N], clipped: False everywhere).

    Raises:
        ValueError: the step size is not positive, or the shapes differ.

    Example:
        >>> import torch
        >>> mirror_descent_surrogate(torch.tensor([1.0, 2.0]), torch.ones(2), step_size=0.5).value
        tensor([1.0000, 1.2274])
    """
    check_same_shape(ratio=ratio, advantage=advantage)
    if step_size <= 0:
        raise ValueError(f"step size must be > 0, got {step_size}")
    # Near 1 the terms cancel to (r - 1)² / 2, which float32 would replace by noise of either sign.
    wide = ratio.double()
    divergence = wide * wide.log() - (wide - 1)
    return unclipped(ratio * advantage - divergence.to(ratio.dtype) / step_size)


def regression_surrogate(
    logp_current: Tensor, logp_behaviour: Tensor, advantage: Tensor, turn: Tensor, *, beta: float
) -> SurrogateValue:
    r"""Regress the log-ratio of a turn on its advantage.

    .. math:: -\frac{1}{2 n} \Big(\sum_{t \in \text{turn}} \log\frac{\pi_\theta(a_t)}{\mu(a_t)}
              - \frac{1}{\beta} \sum_{t \in \text{turn}} A_t\Big)^2

    DAPO, direct advantage policy optimisation, arXiv:2412.18279. Each of the turn's n tokens has the n-th part. With
    advantages of single steps, A_t = r_t + V_{t+1} - V_t, the sum over a turn is r + V(after) - V(before).

    Args:
        logp_current: [N], with gradient.
        logp_behaviour: [N], of the policy that sampled the tokens.
        advantage: [N], of single tokens.
        turn: int64 [N], equal within a turn, different in different trajectories.
        beta: > 0.

    Returns:
        (objective [N] <= 0, clipped: False everywhere). Where both policies agree, the gradient with respect to each
        log-probability of a turn, summed over the turn's objectives, is A / beta. It is 0 where the log-ratio is
        A / beta.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> lp, row = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([0, 0, 1])
        >>> regression_surrogate(lp, lp, torch.tensor([0.25, 0.75, 2.0]), row, beta=1.0).value
        tensor([-0.2500, -0.2500, -2.0000])
    """
    check_same_shape(logp_current=logp_current, logp_behaviour=logp_behaviour, advantage=advantage, turn=turn)
    rest, tokens = segment_sums(logp_current - logp_behaviour - advantage / beta, turn)
    return unclipped(-0.5 * rest**2 / tokens)


def mirror_step_size(k: int, total: int) -> float:
    r"""Return the step size of `mirror_descent_surrogate` in batch k of a run; it falls from 1 to 1 / total.

    .. math:: t_k = 1 - (k - 1) / K

    arXiv:2005.09814, as in its released program. After the K-th batch it stays at 1 / K.

    Args:
        k: number of the batch, counted from 1.
        total: number of batches K, >= 1.

    Raises:
        ValueError: k or total is below 1.

    Example:
        >>> import torch
        >>> [mirror_step_size(k, 4) for k in (1, 2, 4, 9)]
        [1.0, 0.75, 0.25, 0.25]
    """
    if k < 1 or total < 1:
        raise ValueError(f"batches count from 1, got batch {k} of {total}")
    return 1 - (min(k, total) - 1) / total
