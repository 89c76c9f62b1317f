"""Surrogate objectives per token, which are maximised in place of the return, and bounds for their clips.

The names of the arguments say which policies a ratio compares. Where an argument is just ``ratio``, the caller chooses
current / proximal or current / behaviour. Advantages are constants for the gradient. ``low`` and ``high`` are half
widths around 1, except for balanced clipping (BAPO), where they are bounds of the ratio itself.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from learner.algorithms.tokens import check_same_shape


def clipped_surrogate(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    r"""Compute PPO's pessimistic objective.

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

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
        >>> clipped_surrogate(r, a, low=0.2, high=0.28)
        tensor([ 1.2800, -1.5000, -0.8000])
    """
    check_same_shape(ratio=ratio, advantage=advantage)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clip_active(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """Return where the clip cuts off the gradient of `clipped_surrogate`, bool [N].

    The mean of the result is the clip fraction. The arguments are those of `clipped_surrogate`.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
        >>> clip_active(r, a, low=0.2, high=0.28)
        tensor([ True, False,  True])
    """
    check_same_shape(ratio=ratio, advantage=advantage)
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


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
    HAPO and clips that contract with lag (`learner.algorithms.surrogates`). The released program of LOOP
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
        `learner.algorithms.surrogates`.

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
    bounds. Its mask consists of two `learner.algorithms.ratios.interval_correction`.

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
    logp_current: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    *,
    low: float = 0.0,
    high: float,
    reject: bool = False,
) -> SurrogateValue:
    r"""Compute REINFORCE with a bounded importance weight: no token loses its gradient, unless it is rejected.

    .. math:: \mathrm{sg}[\mathrm{clip}(r_t, l, h)]\, A_t \log \pi_\theta(a_t|s_t)

    CISPO (arXiv:2506.13585, equations 4 and 5), whose experiments bound the weight only from above, l = 0;
    AIPO (arXiv:2505.24034) with l = 0 and the ratio to the behaviour policy. With ``reject``, tokens outside the bounds
    have no gradient, whatever the sign of their advantage: SAO (arXiv:2607.07508) with 0.7 and 6.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        ratio: [N], > 0; no gradient flows to it.
        advantage: [N].
        low, high: bounds of the weight itself, 0 <= low <= high.
        reject: whether the weight is 0 outside the bounds, instead of the nearest bound.

    Returns:
        (objective [N], clipped bool [N]: True where rejected). Only the gradient of the objective has a meaning, not
        its value.

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
    if reject:
        inside = (ratio.detach() >= low) & (ratio.detach() <= high)
        return SurrogateValue(
            torch.where(inside, ratio.detach() * advantage * logp_current, 0 * logp_current), ~inside
        )
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
    `learner.algorithms.ratios.interval_correction` with the ratio of the turn. The less likely a bad
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


def shaped_imitation(logp: Tensor, *, shaping: float) -> Tensor:
    r"""Compute the shaped probability of tokens that somebody else wrote.

    .. math:: f(p) = \frac{p}{p + \lambda} = \sigma(\log p - \log \lambda), \qquad
              \nabla f = f (1 - f) \nabla \log p

    AMPO (arXiv:2510.02227, authors' program) and LUFFY (arXiv:2504.14945, section 3.2). In comparison with log p, a
    token that is all but sure already, or that the policy holds to be impossible, has a small gradient.

    Args:
        logp: log-probabilities [N], nats, with gradient.
        shaping: lambda, > 0: the probability of tokens with the largest gradient.

    Returns:
        f(p) [N], in (0, 1), to be maximised.

    Raises:
        ValueError: ``shaping`` is not positive.

    Example:
        >>> shaped_imitation(torch.tensor([0.1, 0.9]).log(), shaping=0.1)
        tensor([0.5000, 0.9000])
    """
    if shaping <= 0:
        raise ValueError(f"shaping must be > 0, got {shaping}")
    return torch.sigmoid(logp - math.log(shaping))


def shaped_surrogate(logp_current: Tensor, advantage: Tensor, *, shaping: float) -> SurrogateValue:
    r"""Compute the shaped objective of tokens without a ratio.

    .. math:: A \frac{p}{p + \lambda}, \qquad p = \exp(\text{logp\_current})

    AMPO (arXiv:2510.02227) and ICPO (arXiv:2510.26519), as their programs have it: the behaviour probability is taken
    as 1, and nothing is clipped.

    Args:
        logp_current: log-probabilities [N], nats, with gradient.
        advantage: A [N].
        shaping: lambda, > 0.

    Returns:
        (objective [N], clipped: False everywhere).

    Raises:
        ValueError: the shapes differ, or ``shaping`` is not positive.

    Example:
        >>> shaped_surrogate(torch.tensor([0.1, 0.9]).log(), torch.tensor([1.0, -2.0]), shaping=0.1).value
        tensor([ 0.5000, -1.8000])
    """
    check_same_shape(logp_current=logp_current, advantage=advantage)
    return unclipped(advantage * shaped_imitation(logp_current, shaping=shaping))


BalanceMeasure = Literal["value", "gradient"]
BalanceOrder = Literal["paper", "code"]


# --- balanced: BAPO -------------------------------------------------------------------------------------------


class BalancedBounds(NamedTuple):
    """Clip bounds of the ratio itself, the share that they achieve, and how far the search went."""

    low: float
    high: float
    share: float
    """Share of positive advantages in the surrogate, [0, 1]; 1 where no negative advantage counts."""
    moves: int
    """Steps along the path; the length of the path minus 1 where no earlier position met the target."""


def balance_path(
    *,
    low: tuple[float, float],
    high: tuple[float, float],
    low_step: float,
    high_step: float,
    order: BalanceOrder = "paper",
) -> list[tuple[float, float]]:
    r"""List clip bounds (low, high) in the order in which BAPO (arXiv:2510.18927) tries them.

    ``paper`` (the default) raises high by its step as far as it goes, then low, and stops as soon as low has
    no room for a step. So nothing moves, not even high, where the range of low is shorter than its step.
    ``code`` raises low first, then high, as the released program does. Raising low removes gradient from
    negative tokens; raising high only adds gradient to positive tokens. The paper's order therefore adds
    gradient before it removes any, which is why it is the default.

    Args:
        low, high: (start, stop) of the bounds of the ratio itself, dimensionless; the paper uses (0.6, 0.9)
            and (1.2, 3.0).
        low_step, high_step: > 0; the paper uses 0.02 and 0.05.
        order: ``paper`` or ``code``.

    Returns:
        The path, which begins with the two starts. Steps are counted in integers, so equal settings give
        equal bounds on every rank, and a stop that is a whole number of steps away is reached in spite of
        rounding.

    Raises:
        ValueError: a stop below its start, or a step that is not positive.

    Example:
        >>> balance_path(low=(0.6, 0.8), high=(1.2, 1.3), low_step=0.1, high_step=0.05)
        [(0.6, 1.2), (0.6, 1.25), (0.6, 1.3), (0.7, 1.3), (0.8, 1.3)]
    """
    lows, highs = _positions("low", low, low_step), _positions("high", high, high_step)
    match order:
        case "paper":
            if len(lows) == 1:
                return [(lows[0], highs[0])]
            return [(lows[0], bound) for bound in highs] + [(bound, highs[-1]) for bound in lows[1:]]
        case "code":
            return [(bound, highs[0]) for bound in lows] + [(lows[-1], bound) for bound in highs[1:]]
        case _:
            assert_never(order)


def _positions(name: str, span: tuple[float, float], step: float) -> list[float]:
    """List start, start + step, and so on, up to the stop."""
    start, stop = span
    if stop < start or step <= 0:
        raise ValueError(f"{name}: needs start <= stop and a step > 0, got {start}, {stop}, step {step}")
    moves = math.floor((stop - start) / step + 1e-9)
    return [round(start + i * step, 12) for i in range(moves + 1)]


def balance_sums(
    ratio: Tensor,
    advantage: Tensor,
    weight: Tensor,
    path: Sequence[tuple[float, float]],
    *,
    measure: BalanceMeasure = "gradient",
) -> Tensor:
    r"""Sum the parts of positive and of negative advantages in the surrogate, at each position of a path.

    ``value`` (arXiv:2510.18927, as published):

    .. math:: S^+ = \sum_{A_t>0} w_t |\min(r_t A_t, \mathrm{clip}(r_t, 0, h) A_t)|, \quad
              S^- = \sum_{A_t<0} w_t |\min(r_t A_t, \mathrm{clip}(r_t, l, h) A_t)|

    ``gradient`` (our own measure, the default) counts only tokens that still carry gradient:

    .. math:: S^+ = \sum_{A_t>0, r_t \le h} w_t r_t A_t, \quad S^- = \sum_{A_t<0, r_t \ge l} w_t r_t |A_t|

    For a negative token ``value`` counts max(r, l). Raising l therefore makes the negative side *larger*, and
    that half of the published search can only lead away from its target. The paper argues with gradients, and
    raising l does remove negative gradient. Measured by ``gradient``, both moves raise the positive share.

    The paper weights tokens by their behaviour probability, the released program by 1. Tokens are already
    sampled from the behaviour policy, so its probability as a further factor would count likely tokens twice
    and hide the unlikely tokens that the method is about. Our default is 1.

    Args:
        ratio: current / behaviour as published, or current / proximal, [N], > 0; no gradient flows.
        advantage: [N].
        weight: w_t [N], >= 0: 1, or the behaviour probability. 0 leaves a token out.
        path: P positions from `balance_path`.
        measure: ``value`` or ``gradient``.

    Returns:
        (S+, S-), float64 [P, 2]. The sums are additive: when they are summed over micro-batches and ranks
        before `choose_bounds`, all ranks choose the same bounds.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 0.5, 1.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> path = [(0.6, 1.2), (0.6, 2.0)]
        >>> balance_sums(r, a, torch.ones(3), path, measure="gradient").tolist()
        [[0.0, 1.0], [1.5, 1.0]]
        >>> balance_sums(r, a, torch.ones(3), path, measure="value").tolist()
        [[1.2, 1.6], [1.5, 1.6]]
    """
    check_same_shape(ratio=ratio, advantage=advantage, weight=weight)
    r, a, w = ratio.detach().double(), advantage.detach().double(), weight.detach().double()
    positive, negative = w * a.clamp(min=0), w * (-a).clamp(min=0)
    # S+ depends on high alone and S- on low alone, so one sum is kept for each distinct bound.
    lows, highs = (dict.fromkeys(bounds) for bounds in zip(*path, strict=True))
    match measure:
        case "value":
            above = {high: (positive * r.clamp(max=high)).sum() for high in highs}
            below = {low: (negative * r.clamp(min=low)).sum() for low in lows}
        case "gradient":
            above = {high: (positive * r * (r <= high)).sum() for high in highs}
            below = {low: (negative * r * (r >= low)).sum() for low in lows}
        case _:
            assert_never(measure)
    return torch.stack([torch.stack([above[high], below[low]]) for low, high in path])


def choose_bounds(sums: Tensor, path: Sequence[tuple[float, float]], *, target: float) -> BalancedBounds:
    r"""Return the first bounds of a path at which positive advantages reach the target share, else the last.

    .. math:: \rho = S^+ / (S^+ + S^-) \ge \rho_0

    The search of arXiv:2510.18927 begins at the start of the path at every update (no memory). Where no
    negative token counts there is nothing to balance, and nothing moves. The released program compares S+/S-
    with a ratio x instead, which is equivalent to the target x / (1 + x): a ratio of
    1.0 there is a target of 0.5 here, and the paper's target of 0.4 is a ratio of 2/3 there.

    Args:
        sums: (S+, S-) [P, 2] of the whole mini-batch, over all ranks.
        path: P positions from `balance_path`.
        target: smallest share to accept, in [0, 1]; 0 never moves.

    Raises:
        ValueError: sums and path differ in length, or the path is empty.

    Example:
        >>> path = [(0.6, 1.2), (0.6, 2.0), (0.7, 2.0)]
        >>> choose_bounds(torch.tensor([[0.0, 1.0], [1.5, 1.0], [1.5, 0.5]]), path, target=0.5)
        BalancedBounds(low=0.6, high=2.0, share=0.6, moves=1)
    """
    if len(sums) != len(path) or not path:
        raise ValueError(f"needs one pair of sums per position, got {len(sums)} for {len(path)} positions")
    bounds = BalancedBounds(*path[0], share=1.0, moves=0)
    for moves, ((low, high), (positive, negative)) in enumerate(zip(path, sums.tolist(), strict=True)):
        share = positive / (positive + negative) if negative > 0 else 1.0
        bounds = BalancedBounds(low, high, share, moves)
        if share >= target:
            break
    return bounds


# --- by policy lag --------------------------------------------------------------------------------------------


def lag_bounds(lag: Tensor, *, low: float, high: float, contraction: float) -> tuple[Tensor, Tensor]:
    r"""Contract the half widths of the clip range with the policy lag.

    .. math:: \epsilon_t = \epsilon / (1 + c\,d_t)

    This rule is our own: the staler a token, the less one update may move it. At lag 0, or with c = 0, value
    and gradient are those of plain PPO (arXiv:1707.06347, equation 7); low != high is clip-higher.

    Args:
        lag: d_t [N], versions, >= 0.
        low, high: half widths at lag 0.
        contraction: c >= 0, per version.

    Returns:
        (low [N], high [N]), in (0, low] and (0, high].

    Raises:
        ValueError: contraction is negative.

    Example:
        >>> lag_bounds(torch.tensor([0.0, 4.0]), low=0.2, high=0.28, contraction=0.25)
        (tensor([0.2000, 0.1000]), tensor([0.2800, 0.1400]))
    """
    if contraction < 0:
        raise ValueError(f"contraction must be >= 0, got {contraction}")
    scale = 1 + contraction * lag
    return low / scale, high / scale
