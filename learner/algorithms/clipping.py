"""Clip bounds that adapt to the balance of advantages, or to a token's policy lag.

``low`` and ``high`` are bounds of the ratio itself in the first part (balanced). In the second part they are half
widths around 1, as in `learner.algorithms.ppo.clipped_surrogate`.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from learner.algorithms.shapes import check_same_shape

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
