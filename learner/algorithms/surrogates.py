"""Surrogate objectives per token, which are maximised in place of the return.

The names of the arguments say which policies a ratio compares. Where an argument is just ``ratio``, the
caller chooses current / proximal or current / behaviour. Advantages are constants for the gradient.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from learner.algorithms.ppo import clip_active
from learner.algorithms.shapes import check_same_shape


class SurrogateValue(NamedTuple):
    """Objective of each token, and where it was clipped, [N] each."""

    value: Tensor
    """Objective, to be maximised."""
    clipped: Tensor
    """Bool: True where a bound made the gradient of the value exactly zero."""


# --- clips ----------------------------------------------------------------------------------------------------


def dual_clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    *,
    low: float | Tensor,
    high: float | Tensor,
    ceiling: float | None = None,
) -> SurrogateValue:
    r"""Compute PPO's pessimistic objective, bounded also where the ratio is large and the advantage negative.

    .. math:: \min(r_t A_t, \mathrm{clip}(r_t, 1-\epsilon_l, 1+\epsilon_h) A_t), \quad
              \text{and for } A_t < 0 \text{ at least } c A_t

    arXiv:1707.06347, equation 7, with the dual clip of arXiv:1912.09729 (c = 3 there). Bounds per token serve
    HAPO and clips that contract with lag (`learner.algorithms.clipping`). The released program of LOOP
    (arXiv:2502.01600) clips to [1/(1+ε), 1+ε]: low = 1 - 1/(1+ε), high = ε. With the ratio of the sequence
    this objective is GSPO (arXiv:2507.18071, equation 5).

    Args:
        ratio: [N], > 0, with gradient.
        advantage: [N].
        low, high: half widths around 1, dimensionless, >= 0; numbers or [N]. With low >= 1 nothing is clipped
            below.
        ceiling: c > 1, bound of the ratio where the advantage is negative; None or infinity means no dual
            clip.

    Returns:
        (objective [N], clipped bool [N]). Without a ceiling these are `clipped_surrogate` and `clip_active` of
        `learner.algorithms.ppo`.

    Raises:
        ValueError: the ceiling is not above 1 and would clip on-policy tokens, or the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> dual_clipped_surrogate(r, a, low=0.2, high=0.28, ceiling=3.0)
        SurrogateValue(value=tensor([ 1.2800, -0.8000, -3.0000]), clipped=tensor([True, True, True]))
    """
    check_same_shape(ratio=ratio, advantage=advantage, low=low, high=high)
    if ceiling is not None and not ceiling > 1:
        raise ValueError(f"ceiling must be > 1, got {ceiling}")
    return _clip(ratio, advantage, 1 - low, 1 + high, math.inf if ceiling is None else ceiling)


def _clip(
    ratio: Tensor, advantage: Tensor, lower: float | Tensor, upper: float | Tensor, ceiling: float
) -> SurrogateValue:
    # `where` selects the values, because minimum and maximum would split the gradient at ties.
    positive, negative = advantage > 0, advantage < 0
    above, below, far = positive & (ratio > upper), negative & (ratio < lower), negative & (ratio > ceiling)
    held = torch.where(above, upper, torch.where(below, lower, torch.where(far, ceiling, ratio)))
    return SurrogateValue(held * advantage, above | below | far)


def window_clipped_surrogate(
    ratio_current_behaviour: Tensor, centre: Tensor, advantage: Tensor, *, epsilon: float
) -> SurrogateValue:
    r"""Clip the ratio to a window around the ratio proximal / behaviour.

    .. math:: \min(r_t A_t, \mathrm{clip}(r_t, \max(0, c_t - \epsilon), c_t + \epsilon) A_t), \quad
              r = \pi_\theta/\mu, \ c = \pi_\mathrm{prox}/\mu

    Mix-PPG of ReMix (arXiv:2507.06892). At lag 0, where c = 1, it is PPO. Where current and proximal policy
    are equal, nothing is clipped, however stale the token is, and its gradient is c A. The ratio already
    corrects staleness; a further correction would count it twice. A decoupled clip has this centre but a
    different width, [c(1-ε), c(1+ε)].

    Args:
        ratio_current_behaviour: r [N], > 0, with gradient.
        centre: c = proximal / behaviour [N], >= 0; no gradient flows to it.
        advantage: [N].
        epsilon: half width, >= 0.

    Returns:
        (objective [N], clipped bool [N]).

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> r, c = torch.tensor([1.75, 2.5, 0.25]), torch.tensor([2.0, 2.0, 0.5])
        >>> window_clipped_surrogate(r, c, torch.tensor([1.0, 1.0, -1.0]), epsilon=0.25)
        SurrogateValue(value=tensor([ 1.7500,  2.2500, -0.2500]), clipped=tensor([False,  True, False]))
    """
    check_same_shape(ratio_current_behaviour=ratio_current_behaviour, centre=centre, advantage=advantage)
    centre = centre.detach()
    lower, upper = (centre - epsilon).clamp(min=0), centre + epsilon
    return _clip(ratio_current_behaviour, advantage, lower, upper, math.inf)


def triplet_clipped_surrogate(
    ratio_current_behaviour: Tensor,
    advantage: Tensor,
    *,
    negative_low: float,
    negative_high: float,
    positive_high: float,
) -> SurrogateValue:
    r"""Clip the ratio to the behaviour policy itself, with three bounds.

    .. math:: A_t \min(r_t, h^+) \ (A_t > 0), \quad A_t\,\mathrm{clip}(r_t, l^-, h^-) \ (A_t < 0)

    HisPO (arXiv:2603.21065, equation 8). The outer minimum printed there would undo the upper bound for
    negative advantages, which the text calls a dual clip; we follow the text. The paper does not report the
    bounds. Its mask consists of two `learner.algorithms.corrections.interval_correction`.

    Args:
        ratio_current_behaviour: r [N], > 0, with gradient.
        advantage: [N].
        negative_low, negative_high: bounds of the ratio where the advantage is negative, 0 <= low < high.
        positive_high: upper bound of the ratio where the advantage is positive.

    Returns:
        (objective [N], clipped bool [N]).

    Raises:
        ValueError: the bounds for negative advantages are not in order, or the shapes differ.

    Example:
        >>> r, a = torch.tensor([2.0, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> triplet_clipped_surrogate(r, a, negative_low=0.75, negative_high=5.0, positive_high=1.25)
        SurrogateValue(value=tensor([ 1.2500, -0.7500, -5.0000]), clipped=tensor([True, True, True]))
    """
    check_same_shape(ratio_current_behaviour=ratio_current_behaviour, advantage=advantage)
    if not 0 <= negative_low < negative_high:
        raise ValueError(f"needs 0 <= negative_low < negative_high, got {negative_low} and {negative_high}")
    return _clip(ratio_current_behaviour, advantage, negative_low, positive_high, negative_high)


# --- weighted log-likelihood ----------------------------------------------------------------------------------


def weighted_surrogate(
    logp_current: Tensor, ratio: Tensor, advantage: Tensor, *, low: float = 0.0, high: float
) -> SurrogateValue:
    r"""Compute REINFORCE with a bounded importance weight: no token loses its gradient.

    .. math:: \mathrm{sg}[\mathrm{clip}(r_t, l, h)]\, A_t \log \pi_\theta(a_t|s_t)

    CISPO (arXiv:2506.13585, equations 4 and 5), whose experiments bound the weight only from above, l = 0;
    AIPO (arXiv:2505.24034) with l = 0 and the ratio to the behaviour policy.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio: [N], > 0; no gradient flows to it.
        advantage: [N].
        low, high: bounds of the weight itself, 0 <= low <= high.

    Returns:
        (objective [N], clipped: False everywhere). Only the gradient of the objective has a meaning, not its
        value.

    Raises:
        ValueError: the bounds are not in order, or the shapes differ.

    Example:
        >>> lp = torch.tensor([-1.0, -2.0])
        >>> weighted_surrogate(lp, torch.tensor([0.5, 9.0]), torch.tensor([1.0, -1.0]), high=4.0).value
        tensor([-0.5000,  8.0000])
    """
    check_same_shape(logp_current=logp_current, ratio=ratio, advantage=advantage)
    if not 0 <= low <= high:
        raise ValueError(f"needs 0 <= low <= high, got low {low}, high {high}")
    return unclipped(ratio.detach().clamp(low, high) * advantage * logp_current)


def unclipped(value: Tensor) -> SurrogateValue:
    """Wrap an objective that no bound has clipped."""
    return SurrogateValue(value, torch.zeros_like(value, dtype=torch.bool))


def minirl_surrogate(
    logp_current: Tensor,
    ratio_current_proximal: Tensor,
    ratio_current_behaviour: Tensor,
    advantage: Tensor,
    *,
    low: float,
    high: float,
    ceiling: float,
) -> SurrogateValue:
    r"""Compute REINFORCE, weighted by one ratio and masked by a different ratio.

    .. math:: M_t\,\mathrm{sg}[\min(\pi_\theta/\mu, C)]\, A_t \log \pi_\theta(a_t|s_t), \quad
              M_t = 0 \text{ where PPO would clip } \pi_\theta/\pi_\mathrm{prox}

    MiniRL (arXiv:2512.01374; low 0.2, high 0.27 and C = 5 there, advantages centred and not scaled, sum over
    tokens). Where behaviour and proximal policy are equal, its gradient is the gradient of PPO. The weight
    already corrects staleness; a further correction would count it twice.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio_current_proximal, ratio_current_behaviour: [N], > 0; no gradient flows to them.
        advantage: [N].
        low, high: half widths around 1, >= 0, of the ratio to the proximal policy.
        ceiling: C > 0, upper bound of the weight.

    Returns:
        (objective [N], clipped bool [N]: True where masked). Only the gradient of the objective has a
        meaning, not its value.

    Raises:
        ValueError: the ceiling is not positive, or the shapes differ.

    Example:
        >>> lp, r, w = torch.tensor([-1.0, -1.0]), torch.tensor([1.5, 1.0]), torch.tensor([1.5, 9.0])
        >>> minirl_surrogate(lp, r, w, torch.ones(2), low=0.2, high=0.27, ceiling=5.0)
        SurrogateValue(value=tensor([ 0., -5.]), clipped=tensor([ True, False]))
    """
    check_same_shape(
        logp_current=logp_current,
        ratio_current_proximal=ratio_current_proximal,
        ratio_current_behaviour=ratio_current_behaviour,
        advantage=advantage,
    )
    if ceiling <= 0:
        raise ValueError(f"ceiling must be > 0, got {ceiling}")
    masked = clip_active(ratio_current_proximal.detach(), advantage, low=low, high=high)
    weight = ratio_current_behaviour.detach().clamp(max=ceiling)
    return SurrogateValue(torch.where(masked, 0, weight * advantage * logp_current), masked)


def chunk_surrogate(logp_current: Tensor, ratio_chunk: Tensor, return_: Tensor) -> SurrogateValue:
    r"""Imitate chunks that went well, and apply REINFORCE with a bounded ratio to chunks that did not.

    .. math:: G_t \log \pi_\theta(a_t|s_t) \ (G_t \ge 0), \quad
              \mathrm{sg}[\min(\rho_t, 1)]\, G_t \log \pi_\theta(a_t|s_t) \ (G_t < 0)

    IPA (arXiv:2512.24873, equations 9 and 10), without its mismatch mask, which is
    `learner.algorithms.corrections.interval_correction` with the ratio of the turn. The less likely a bad
    chunk has already become, the less it is pushed down.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio_chunk: current / proximal [N], > 0, geometric mean over the chunk; no gradient flows to it.
        return_: G [N], the chunk's discounted return or advantage, given to all of its tokens.

    Returns:
        (objective [N], clipped: False everywhere). Only the gradient of the objective has a meaning, not its
        value.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> lp, rho = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([4.0, 4.0, 0.5])
        >>> chunk_surrogate(lp, rho, torch.tensor([1.0, -1.0, -1.0])).value
        tensor([-1.0000,  1.0000,  0.5000])
    """
    check_same_shape(logp_current=logp_current, ratio_chunk=ratio_chunk, return_=return_)
    weight = torch.where(return_ < 0, ratio_chunk.detach().clamp(max=1), 1)
    return unclipped(weight * return_ * logp_current)
