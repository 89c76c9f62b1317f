"""Clip bounds that adapt: to the balance of advantages, to a token's entropy, to its policy lag; and what
clipping does to the entropy of the policy.

Bounds of the ratio itself are called ``low`` and ``high`` in the first part (balanced), half widths around 1
in the others, as in `learner.algorithms.surrogates.clipped_surrogate`.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

BalanceMeasure = Literal["value", "gradient"]
BalanceOrder = Literal["paper", "code"]


# --- balanced: BAPO -------------------------------------------------------------------------------------------


class BalancedBounds(NamedTuple):
    """Clip bounds of the ratio itself, what they achieve, and how far the search went."""

    low: float
    high: float
    share: float
    """Of positive advantages in the surrogate, [0, 1]; 1 where no negative one counts."""
    moves: int
    """Steps along the path; its length - 1 where the target was not met before the end."""


def balance_path(
    *,
    low: tuple[float, float],
    high: tuple[float, float],
    low_step: float,
    high_step: float,
    order: BalanceOrder = "paper",
) -> list[tuple[float, float]]:
    r"""Clip bounds (low, high) in the order in which BAPO (arXiv:2510.18927) tries them.

    ``paper`` (the default): raise high by its step as far as it goes, then low; stop as soon as low has no
    room for a step. So nothing moves, not even high, where the range of low is shorter than its step.
    ``code``: raise low first, then high, as the released program does. Raising low takes gradient away from
    negative tokens, raising high only gives some to positive ones: the paper's order changes the update less
    before it discards anything, hence the default.

    Args:
        low, high: (start, stop) of the bounds of the ratio itself, dimensionless; the paper uses (0.6, 0.9)
            and (1.2, 3.0).
        low_step, high_step: > 0; the paper uses 0.02 and 0.05.

    Returns:
        The path, the starts first. Steps are counted in integers, so that equal settings give equal bounds
        on every rank; a stop is reached even where the step does not divide the range in binary.

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
    r"""What positive and negative advantages hold of the surrogate, at each pair of bounds of a path.

    ``value`` (arXiv:2510.18927, as published):

    .. math:: S^+ = \sum_{A_t>0} w_t |\min(r_t A_t, \mathrm{clip}(r_t, 0, h) A_t)|, \quad
              S^- = \sum_{A_t<0} w_t |\min(r_t A_t, \mathrm{clip}(r_t, l, h) A_t)|

    ``gradient`` (ours, the default), only tokens that still carry gradient:

    .. math:: S^+ = \sum_{A_t>0, r_t \le h} w_t r_t A_t, \quad S^- = \sum_{A_t<0, r_t \ge l} w_t r_t |A_t|

    Of a negative token the value holds max(r, l): raising l makes the negative side *larger*, and that half
    of the published search can only lead away from its target. Its argument is about gradients, of which
    raising l does remove negative ones; measured there, both moves raise the positive share.

    The paper weighs tokens with their behaviour probability, the released program with 1. Tokens are
    sampled from that policy already, so a second factor of it would count likely tokens twice and hide the
    unlikely ones the method is about: 1 is our default.

    Args:
        ratio: current / behaviour [N], > 0; no gradient flows.
        advantage: [N].
        weight: w_t [N], >= 0: 1, or the behaviour probability. 0 leaves a token out.
        path: from `balance_path`, [P].

    Returns:
        (S+, S-), float64 [P, 2]. They add up: sum them over micro-batches and ranks before `choose_bounds`,
        and all ranks choose the same bounds.

    Example:
        >>> r, a = torch.tensor([1.5, 0.5, 1.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> path = [(0.6, 1.2), (0.6, 2.0)]
        >>> balance_sums(r, a, torch.ones(3), path, measure="gradient").tolist()
        [[0.0, 1.0], [1.5, 1.0]]
        >>> balance_sums(r, a, torch.ones(3), path, measure="value").tolist()
        [[1.2, 1.6], [1.5, 1.6]]
    """
    r, a, w = ratio.detach().double(), advantage.detach().double(), weight.detach().double()
    positive, negative = w * a.clamp(min=0), w * (-a).clamp(min=0)
    # S+ depends on high alone and S- on low alone: distinct bounds are few
    above: dict[float, Tensor] = {}
    below: dict[float, Tensor] = {}
    for low, high in path:
        match measure:
            case "value":
                above.setdefault(high, (positive * r.clamp(max=high)).sum())
                below.setdefault(low, (negative * r.clamp(min=low)).sum())
            case "gradient":
                above.setdefault(high, (positive * r * (r <= high)).sum())
                below.setdefault(low, (negative * r * (r >= low)).sum())
            case _:
                assert_never(measure)
    return torch.stack([torch.stack([above[high], below[low]]) for low, high in path])


def choose_bounds(sums: Tensor, path: Sequence[tuple[float, float]], *, target: float) -> BalancedBounds:
    r"""First bounds of a path at which positive advantages hold their share, else the last.

    .. math:: \rho = S^+ / (S^+ + S^-) \ge \rho_0

    The search of arXiv:2510.18927, from its start at every update (no memory). Where no
    negative token counts there is nothing to balance, and nothing moves. The released program compares S+/S-
    with a ratio x instead, which is the same as the target x / (1 + x): 1.0 there is 0.5 here, and the
    paper's 0.4 is 2/3 there.

    Args:
        sums: (S+, S-) [P, 2] of the whole mini-batch, over all ranks.
        path: from `balance_path`, [P].
        target: least share, in [0, 1]; 0 never moves.

    Raises:
        ValueError: sums and path are not of one length, or the path is empty.

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


# --- by entropy: HAPO -----------------------------------------------------------------------------------------


def entropy_signal(entropy: Tensor, *, quantile: float = 0.8, epsilon: float = 1e-8) -> Tensor:
    r"""How uncertain the policy was at each token, against the other tokens of the batch.

    .. math:: h_t = \log\max(H_t, \epsilon) - Q_\rho, \quad
              \tilde h_t = h_t / \max_s h_s \ (h_t > 0), \quad h_t / |\min_s h_s| \ (h_t \le 0)

    HAPO (arXiv:2509.16591). The published scale (root mean square of h) cancels and is left out. The
    released program divides negative h by the negative minimum, which turns certain tokens into uncertain
    ones; we follow the paper, where the signal keeps the sign of h.

    Args:
        entropy: [M] of *all* tokens of the batch that carry policy gradient, nats, >= 0.
        quantile: rho; tokens above that quantile of the entropy are the uncertain ones. The nearest order
            statistic, as in the released program.
        epsilon: least entropy that is told apart, nats; the released program's default.

    Returns:
        [M] in [-1, 1], without gradient: 1 at the most uncertain token, -1 at the most certain one, 0 where
        all are equal.

    Example:
        >>> entropy_signal(torch.tensor([0.05, 0.1, 0.2, 0.4, 1.6]))
        tensor([-1.0000, -0.6667, -0.3333,  0.0000,  1.0000])
    """
    if not entropy.numel():
        return entropy.detach()
    level = entropy.detach().clamp(min=epsilon).log()
    rank = round(quantile * (len(level) - 1)) + 1
    h = level - level.kthvalue(rank).values
    tiny = torch.finfo(h.dtype).tiny
    return torch.where(h > 0, h / h.max().clamp(min=tiny), h / (-h.min()).clamp(min=tiny))


def hapo_bounds(signal: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    r"""Half widths of the clip range, token by token.

    .. math:: \tilde h_t \le 0: (\epsilon_l (1 - \tilde h_t), \epsilon_h), \quad
              \tilde h_t > 0: (\epsilon_l, \epsilon_h (1 + \tilde h_t))

    HAPO (arXiv:2509.16591), asymmetric adaptive clipping: certain tokens may fall further, uncertain ones may
    rise further, up to twice as far.

    Args:
        signal: from `entropy_signal`, [N], in [-1, 1].
        low, high: half widths at signal 0.

    Returns:
        (low [N] in [low, 2 low], high [N] in [high, 2 high]); from low = 0.5 on, the lower bound of the ratio
        may reach 0 and cut nothing.

    Example:
        >>> hapo_bounds(torch.tensor([-1.0, 0.0, 0.5]), low=0.2, high=0.4)
        (tensor([0.4000, 0.2000, 0.2000]), tensor([0.4000, 0.4000, 0.6000]))
    """
    return low * (1 - signal.clamp(max=0)), high * (1 + signal.clamp(min=0))


def hapo_redistribute(advantage: Tensor, ratio: Tensor, signal: Tensor, *, low: float, high: float) -> Tensor:
    r"""Advantages, moved from tokens that change little to those that matter.

    .. math:: A'_t = A_t (1 + \tilde h_t) \text{ if } (\tilde h_t > 0 \wedge r_t \notin N_t) \vee
              (\tilde h_t \le 0 \wedge r_t \in N_t), \text{ else } A_t; \quad
              N_t = [1 - \epsilon_{l,t}/2, 1 + \epsilon_{h,t}/2]

    HAPO (arXiv:2509.16591), differential advantage redistribution, with the half widths of `hapo_bounds`.
    Uncertain tokens count more once they have moved; certain ones count less until they have.

    Args:
        advantage: [N].
        ratio: current / proximal [N]; no gradient flows through where it lies.
        signal: from `entropy_signal`, [N].
        low, high: half widths at signal 0, as given to `hapo_bounds`.

    Returns:
        [N], between 0 and 2 · advantage.

    Example:
        >>> a, r = torch.ones(3), torch.tensor([1.0, 1.0, 1.5])
        >>> hapo_redistribute(a, r, torch.tensor([-0.5, 0.5, 0.5]), low=0.2, high=0.2)
        tensor([0.5000, 1.0000, 1.5000])
    """
    left, right = hapo_bounds(signal, low=low, high=high)
    where = ratio.detach()
    near = (where >= 1 - left / 2) & (where <= 1 + right / 2)
    return torch.where((signal > 0) ^ near, advantage * (1 + signal), advantage)


# --- by policy lag --------------------------------------------------------------------------------------------


def lag_bounds(lag: Tensor, *, low: float, high: float, contraction: float) -> tuple[Tensor, Tensor]:
    r"""Half widths of the clip range that contract with the policy lag.

    .. math:: \epsilon_t = \epsilon / (1 + c\,d_t)

    Ours: the staler a token, the less one update may move it. At lag 0, or with c = 0, plain PPO
    (arXiv:1707.06347, equation 7), value and gradient; low != high is clip-higher.

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


# --- what clipping does to the entropy ------------------------------------------------------------------------
