"""Surrogate objectives per token: what is maximised in place of the return.

Ratios are of the policies that the arguments name, or of any the caller chooses (current / proximal or current
/ behaviour) where an argument is just ``ratio``. Advantages are constant for the gradient.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class SurrogateValue(NamedTuple):
    """Per token [N]."""

    value: Tensor
    """To be maximised."""
    clipped: Tensor
    """Bool, where a bound made the gradient of the value exactly zero."""


def clipped_surrogate(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    r"""PPO's pessimistic objective.

    .. math:: \min(r_t A_t, \mathrm{clip}(r_t, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high}) A_t)

    arXiv:1707.06347, equation 7; with different bounds it is "clip-higher" of DAPO (arXiv:2503.14476,
    section 3.1).

    Args:
        ratio: current / proximal [N], > 0.
        advantage: [N], constant for the gradient.
        low, high: half widths of the clip range, dimensionless; 0 <= low < 1, high >= 0.

    Returns:
        Objective [N], to be maximised. Gradient flows through ``ratio``, except where `clip_active`. At
        ratio 1 its gradient with respect to the log-probability is the advantage.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
        >>> clipped_surrogate(r, a, low=0.2, high=0.28)
        tensor([ 1.2800, -1.5000, -0.8000])
    """
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clip_active(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """Where the clip cuts the gradient of `clipped_surrogate` off. Bool [N]; its mean is the clip fraction.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
        >>> clip_active(r, a, low=0.2, high=0.28)
        tensor([ True, False,  True])
    """
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


# --- clips ----------------------------------------------------------------------------------------------------


def dual_clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    *,
    low: float | Tensor,
    high: float | Tensor,
    ceiling: float | None = None,
) -> SurrogateValue:
    r"""PPO's pessimistic objective, bounded also for unlikely tokens with a negative advantage.

    .. math:: \min(r_t A_t, \mathrm{clip}(r_t, 1-\epsilon_l, 1+\epsilon_h) A_t), \quad
              \text{and for } A_t < 0 \text{ at least } c A_t

    arXiv:1707.06347, equation 7, with the dual clip of arXiv:1912.09729 (c = 3 there). Bounds of
    their own for each token serve HAPO and clips that contract with lag (`learner.algorithms.clipping`). LOOP
    (arXiv:2502.01600) clips to [1/(1+ε), 1+ε] in its released program: low = 1 - 1/(1+ε), high = ε. With the
    ratio of the sequence it is GSPO (arXiv:2507.18071, equation 5).

    Args:
        ratio: [N], > 0, with gradient.
        advantage: [N].
        low, high: half widths around 1, dimensionless, >= 0; numbers or [N]. From low = 1 on, nothing is cut
            below.
        ceiling: c > 1, of the ratio where the advantage is negative; None or infinity: no dual clip.

    Returns:
        (objective [N], clipped bool [N]). Without a ceiling, `clipped_surrogate` and `clip_active`.

    Raises:
        ValueError: a ceiling not above 1, which would clip on-policy tokens.

    Example:
        >>> r, a = torch.tensor([1.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> dual_clipped_surrogate(r, a, low=0.2, high=0.28, ceiling=3.0)
        SurrogateValue(value=tensor([ 1.2800, -0.8000, -3.0000]), clipped=tensor([True, True, True]))
    """
    if ceiling is not None and not ceiling > 1:
        raise ValueError(f"ceiling must be > 1, got {ceiling}")
    return _clip(ratio, advantage, 1 - low, 1 + high, math.inf if ceiling is None else ceiling)


def _clip(
    ratio: Tensor, advantage: Tensor, lower: float | Tensor, upper: float | Tensor, ceiling: float
) -> SurrogateValue:
    # selected, not min and max: those share the gradient out at ties
    positive, negative = advantage > 0, advantage < 0
    above, below, far = positive & (ratio > upper), negative & (ratio < lower), negative & (ratio > ceiling)
    held = torch.where(above, upper, torch.where(below, lower, torch.where(far, ceiling, ratio)))
    return SurrogateValue(held * advantage, above | below | far)


def window_clipped_surrogate(
    ratio_current_behaviour: Tensor, centre: Tensor, advantage: Tensor, *, epsilon: float
) -> SurrogateValue:
    r"""Clip to a window around where the proximal policy stands.

    .. math:: \min(r_t A_t, \mathrm{clip}(r_t, \max(0, c_t - \epsilon), c_t + \epsilon) A_t), \quad
              r = \pi_\theta/\mu, \ c = \pi_\mathrm{prox}/\mu

    Mix-PPG of ReMix (arXiv:2507.06892). At lag 0, c = 1, it is PPO. Where current and proximal policy are
    equal nothing is clipped, however stale the token, and its gradient is c A: the ratio is the correction of
    staleness, another one on top would count it twice. A decoupled clip has the same centre and another
    width, [c(1-ε), c(1+ε)].

    Args:
        ratio_current_behaviour: r [N], > 0, with gradient.
        centre: c [N], >= 0; no gradient flows to it.
        advantage: [N].
        epsilon: half width, >= 0.

    Returns:
        (objective [N], clipped bool [N]).

    Example:
        >>> r, c = torch.tensor([1.75, 2.5, 0.25]), torch.tensor([2.0, 2.0, 0.5])
        >>> window_clipped_surrogate(r, c, torch.tensor([1.0, 1.0, -1.0]), epsilon=0.25)
        SurrogateValue(value=tensor([ 1.7500,  2.2500, -0.2500]), clipped=tensor([False,  True, False]))
    """
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
    r"""Clip with three bounds, of the ratio to the behaviour policy itself.

    .. math:: A_t \min(r_t, h^+) \ (A_t > 0), \quad A_t\,\mathrm{clip}(r_t, l^-, h^-) \ (A_t < 0)

    HisPO (arXiv:2603.21065, equation 8). The outer minimum printed there would undo the upper bound for
    negative advantages, which the text calls a dual clip; we follow the text. Bounds are not reported. Its
    mask is two `learner.algorithms.corrections.interval_correction`.

    Args:
        ratio_current_behaviour: r [N], > 0, with gradient.
        advantage: [N].
        negative_low, negative_high: bounds of the ratio where the advantage is negative, 0 <= low < high.
        positive_high: upper bound where it is positive.

    Returns:
        (objective [N], clipped bool [N]).

    Raises:
        ValueError: the bounds for negative advantages are not in order.

    Example:
        >>> r, a = torch.tensor([2.0, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> triplet_clipped_surrogate(r, a, negative_low=0.75, negative_high=5.0, positive_high=1.25)
        SurrogateValue(value=tensor([ 1.2500, -0.7500, -5.0000]), clipped=tensor([True, True, True]))
    """
    if not 0 <= negative_low < negative_high:
        raise ValueError(f"needs 0 <= negative_low < negative_high, got {negative_low} and {negative_high}")
    return _clip(ratio_current_behaviour, advantage, negative_low, positive_high, negative_high)


# --- weighted log-likelihood ----------------------------------------------------------------------------------


def weighted_surrogate(
    logp_current: Tensor, ratio: Tensor, advantage: Tensor, *, low: float = 0.0, high: float
) -> SurrogateValue:
    r"""REINFORCE with a bounded importance weight: no token loses its gradient.

    .. math:: \mathrm{sg}[\mathrm{clip}(r_t, l, h)]\, A_t \log \pi_\theta(a_t|s_t)

    CISPO (arXiv:2506.13585, equations 4 and 5), whose experiments bound the weight from above alone, l = 0;
    AIPO (arXiv:2505.24034) with l = 0 and the ratio to the behaviour policy.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio: [N], > 0; no gradient flows to it.
        advantage: [N].
        low, high: bounds of the weight itself, 0 <= low <= high.

    Returns:
        (objective [N], clipped: False everywhere). The value is good for its gradient alone.

    Raises:
        ValueError: the bounds are not in order.

    Example:
        >>> lp = torch.tensor([-1.0, -2.0])
        >>> weighted_surrogate(lp, torch.tensor([0.5, 9.0]), torch.tensor([1.0, -1.0]), high=4.0).value
        tensor([-0.5000,  8.0000])
    """
    if not 0 <= low <= high:
        raise ValueError(f"needs 0 <= low <= high, got low {low}, high {high}")
    return unclipped(ratio.detach().clamp(low, high) * advantage * logp_current)


def unclipped(value: Tensor) -> SurrogateValue:
    """A value no bound has cut."""
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
    r"""REINFORCE, weighted by one ratio and masked by another.

    .. math:: M_t\,\mathrm{sg}[\min(\pi_\theta/\mu, C)]\, A_t \log \pi_\theta(a_t|s_t), \quad
              M_t = 0 \text{ where PPO would clip } \pi_\theta/\pi_\mathrm{prox}

    MiniRL (arXiv:2512.01374; 0.2, 0.27 and C = 5 there, advantages centred and not scaled, token sum). Where
    behaviour and proximal policy are equal, its gradient is that of PPO. The weight corrects staleness
    already: another correction on top would count it twice.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio_current_proximal, ratio_current_behaviour: [N], > 0; no gradient flows to them.
        advantage: [N].
        low, high: half widths around 1, >= 0, of the ratio to the proximal policy.
        ceiling: C > 0, of the weight.

    Returns:
        (objective [N], clipped bool [N]: masked). The value is good for its gradient alone.

    Raises:
        ValueError: the ceiling is not positive.

    Example:
        >>> lp, r, w = torch.tensor([-1.0, -1.0]), torch.tensor([1.5, 1.0]), torch.tensor([1.5, 9.0])
        >>> minirl_surrogate(lp, r, w, torch.ones(2), low=0.2, high=0.27, ceiling=5.0)
        SurrogateValue(value=tensor([ 0., -5.]), clipped=tensor([ True, False]))
    """
    if ceiling <= 0:
        raise ValueError(f"ceiling must be > 0, got {ceiling}")
    masked = clip_active(ratio_current_proximal.detach(), advantage, low=low, high=high)
    weight = ratio_current_behaviour.detach().clamp(max=ceiling)
    return SurrogateValue(torch.where(masked, 0, weight * advantage * logp_current), masked)


def chunk_surrogate(logp_current: Tensor, ratio_chunk: Tensor, return_: Tensor) -> SurrogateValue:
    r"""Imitation of what went well, REINFORCE with a bounded ratio of what did not.

    .. math:: G_t \log \pi_\theta(a_t|s_t) \ (G_t \ge 0), \quad
              \mathrm{sg}[\min(\rho_t, 1)]\, G_t \log \pi_\theta(a_t|s_t) \ (G_t < 0)

    IPA (arXiv:2512.24873, equations 9 and 10), without its mismatch mask, which is
    `learner.algorithms.corrections.interval_correction` with the ratio of the turn. A bad chunk that the
    policy has left already is pushed down less the further it is gone.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio_chunk: current / proximal [N], > 0, geometric mean over the chunk; no gradient flows to it.
        return_: G [N], the chunk's discounted return or advantage, given to all of its tokens.

    Returns:
        (objective [N], clipped: False everywhere). The value is good for its gradient alone.

    Example:
        >>> lp, rho = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([4.0, 4.0, 0.5])
        >>> chunk_surrogate(lp, rho, torch.tensor([1.0, -1.0, -1.0])).value
        tensor([-1.0000,  1.0000,  0.5000])
    """
    weight = torch.where(return_ < 0, ratio_chunk.detach().clamp(max=1), 1)
    return unclipped(weight * return_ * logp_current)
