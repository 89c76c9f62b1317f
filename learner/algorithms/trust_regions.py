"""Trust regions of stale tokens: how far two policies are apart at a token, and what is done where they are too far.

Four statistics measure the distance, and masks, bounds, pulls and kernels answer it. The policy in the denominator is
the behaviour policy, which sampled the token. Advantages are constants for the gradient, and no gradient flows through
a distance.
"""

import math
from typing import Literal, assert_never

import torch
from torch import Tensor

from learner.algorithms.ratios import CorrectionValue, importance_ratio, segment_mean, segment_ranks
from learner.algorithms.surrogates import SurrogateValue, unclipped
from learner.algorithms.tokens import check_same_shape

Statistic = Literal["ratio", "log_square", "binary_tv", "binary_kl"]
"""What measures the distance of two policies at a sampled token, see `divergence`."""
LEAST_PROBABILITY = 1e-6
"""Probabilities are kept this far from 0 and 1 in the two-point KL, as NVIDIA's program of FlashREINFORCE does."""


def divergence(logp: Tensor, logp_behaviour: Tensor, *, statistic: Statistic) -> Tensor:
    r"""Measure how far a policy is from the behaviour policy at each sampled token.

    .. math:: |r - 1|, \quad (\log r)^2, \quad |\pi - \mu|, \quad
              \mu \log\frac{\mu}{\pi} + (1 - \mu) \log\frac{1 - \mu}{1 - \pi}, \qquad r = \pi / \mu

    These are the ratio of PPO, the second moment of M2PO (arXiv:2510.01161), and the two-point total variation and KL
    of DPPO (arXiv:2602.04879): those of the distributions "this token" and "another one". Where the token is likely, a
    ratio near 1 may hide a large shift of probability; where it is rare, a large ratio may mean none.

    Args:
        logp: log-probabilities [N], nats.
        logp_behaviour: log-probabilities [N], nats, under the behaviour policy.
        statistic: what measures.

    Returns:
        Distances [N] >= 0, without gradient; 0 where the policies agree. Of ``binary_tv`` at most 1, of the KL and the
        second moment in nats and nats².

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a, b = torch.tensor([0.9, 0.02]).log(), torch.tensor([0.6, 0.01]).log()
        >>> divergence(a, b, statistic="ratio"), divergence(a, b, statistic="log_square")
        (tensor([0.5000, 1.0000]), tensor([0.1644, 0.4805]))
        >>> divergence(a, b, statistic="binary_tv"), divergence(a, b, statistic="binary_kl")
        (tensor([0.3000, 0.0100]), tensor([0.3112, 0.0031]))
    """
    check_same_shape(logp=logp, logp_behaviour=logp_behaviour)
    above, below = logp.detach(), logp_behaviour.detach()
    match statistic:
        case "ratio":
            return (importance_ratio(above, below) - 1).abs()
        case "log_square":
            return (above - below).square()
        case "binary_tv":
            return (above.exp() - below.exp()).abs()
        case "binary_kl":
            p = below.exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
            q = above.exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
            rest = (1 - p) * (torch.log1p(-p) - torch.log1p(-q))
            return (p * (p.log() - q.log()) + rest).clamp(min=0)
        case _:
            assert_never(statistic)


def segment_max(values: Tensor, segment: Tensor) -> Tensor:
    """Give each token the largest value of its segment, [N].

    Args:
        values: [N], floating point.
        segment: int64 [N], >= 0; equal within a segment.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> segment_max(torch.tensor([1.0, 10.0, 3.0]), torch.tensor([7, 0, 7]))
        tensor([ 3., 10.,  3.])
    """
    row = segment_ranks(values, segment)
    return torch.zeros_like(values).scatter_reduce(0, row, values, "amax", include_self=False)[row]


def over_segment(distance: Tensor, segment: Tensor | None, *, over: Literal["mean", "max"]) -> Tensor:
    """Give each token the mean or the largest distance of its segment; without segments its own, [N]."""
    if segment is None:
        return distance
    return segment_mean(distance, segment) if over == "mean" else segment_max(distance, segment)


def divergence_correction(distance: Tensor, weight: Tensor, *, bound: float) -> CorrectionValue:
    r"""Leave out tokens whose distance, or that of their segment, is above a bound.

    .. math:: w_t \text{ if } D_t \le \delta \text{ else } 0

    With the mean two-point KL over a rollout and w = r it is FlashREINFORCE (NVIDIA 2026; δ = 0.003), with the largest
    of a rollout and w = r it is Trust Region Masking (arXiv:2512.23075). The mean over tokens still counts those that
    are left out.

    Args:
        distance: D [N], >= 0.
        weight: w [N], of the tokens that stay.
        bound: δ >= 0.

    Returns:
        (weights [N], left out bool [N]), without gradient. A distance that is not a number is left out.

    Raises:
        ValueError: the bound is negative, or the shapes differ.

    Example:
        >>> divergence_correction(torch.tensor([0.1, 0.3]), torch.tensor([1.1, 1.3]), bound=0.2)
        CorrectionValue(weight=tensor([1.1000, 0.0000]), cut=tensor([False,  True]))
    """
    check_same_shape(distance=distance, weight=weight)
    if bound < 0:
        raise ValueError(f"bound must be >= 0, got {bound}")
    inside = distance <= bound
    return CorrectionValue(torch.where(inside, weight.detach(), 0), ~inside)


def moves_away(ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return where the gradient moves the ratio away from 1: A > 0 and r > 1, or A < 0 and r < 1; bool [N].

    Example:
        >>> moves_away(torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0]))
        tensor([ True, False,  True])
    """
    return ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))


def trust_region_surrogate(
    ratio: Tensor, advantage: Tensor, distance: Tensor, *, bound: float
) -> SurrogateValue:
    r"""Mask tokens that are too far from the behaviour policy and would move farther.

    .. math:: M_t r_t A_t, \quad M_t = 0 \text{ iff } D_t > \delta \text{ and } (A_t > 0, r_t > 1
              \text{ or } A_t < 0, r_t < 1)

    DPPO (arXiv:2602.04879), with δ = 0.2 for the two-point total variation and 0.05 for the two-point KL. With the
    distance \|r - 1\| it has the gradient of PPO with equal half widths. M2PO's mask (arXiv:2510.01161) has the
    distance (log r)² and a bound from `second_moment_cut`.

    Args:
        ratio: current / behaviour [N], > 0, with gradient.
        advantage: [N].
        distance: D [N], >= 0, from `divergence`.
        bound: δ >= 0.

    Returns:
        (objective [N], masked bool [N]).

    Raises:
        ValueError: the bound is negative, or the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, 1.0])
        >>> trust_region_surrogate(r, a, torch.tensor([0.3, 0.3, 0.3]), bound=0.2)
        SurrogateValue(value=tensor([ 0.0000, -1.5000,  0.5000]), clipped=tensor([ True, False, False]))
    """
    check_same_shape(ratio=ratio, advantage=advantage, distance=distance)
    if bound < 0:
        raise ValueError(f"bound must be >= 0, got {bound}")
    masked = moves_away(ratio.detach(), advantage) & (distance > bound)
    return SurrogateValue(torch.where(masked, 0, ratio * advantage), masked)


def second_moment_cut(squares: Tensor, *, budget: float) -> float:
    r"""Return a bound of (log r)² at which M2PO's mask keeps as many as have a mean within the budget.

    .. math:: \max \{ v_k : \tfrac{1}{k} \textstyle\sum_{i \le k} v_i \le \tau \}, \quad v_1 \le v_2 \le \dots

    arXiv:2510.01161: the largest are masked until the rest has a mean of at most τ. Equal values are kept or masked
    together. The bound lies halfway to the smallest one that is masked, so that no rounding decides.

    Args:
        squares: (log r)² [N] of the tokens that `moves_away` names, all those of an optimizer step; above 0.
        budget: τ > 0, nats²; the paper has 0.04 for all models.

    Returns:
        The bound, above the largest value that is kept and below the smallest that is masked; infinity if all are kept.

    Example:
        >>> round(second_moment_cut(torch.tensor([0.25, 0.01, 0.04]), budget=0.04), 6)
        0.145
        >>> second_moment_cut(torch.tensor([0.01, 0.04]), budget=0.04)
        inf
    """
    values = squares.double().sort().values
    if not len(values) or float(values.mean()) <= budget:
        return math.inf
    means = values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)
    # The means of a sorted row never fall, so those within the budget come first.
    first_out = float(values[int((means <= budget).sum())])
    kept = values[values < first_out]
    return (float(kept[-1]) + first_out) / 2 if len(kept) else first_out / 2


def second_moment_cap(squares: Tensor, *, budget: float) -> float:
    r"""Return the cap of \|log r\| at which the mean of the capped (log r)² is the budget.

    .. math:: \tau^* : \tfrac{1}{n} \textstyle\sum_i \min(v_i, \tau^{*2}) = \tau

    The released program of M2PO (arXiv:2510.01161) clips there instead of masking. It takes the next smaller \|log r\|
    of a token; this is the cap itself.

    Args:
        squares: (log r)² [N] of the tokens that `moves_away` names, all those of an optimizer step.
        budget: τ > 0, nats².

    Returns:
        The cap, nats; infinity if the mean is within the budget without one.

    Example:
        >>> round(second_moment_cap(torch.tensor([0.01, 0.25]), budget=0.04) ** 2, 6)
        0.07
    """
    values = squares.double().sort().values
    if not len(values) or float(values.mean()) <= budget:
        return math.inf
    below = values.cumsum(0) - values
    left = torch.arange(len(values), 0, -1, device=values.device)
    caps = (budget * len(values) - below) / left
    # The cap lies below the first value that is above the cap which the smaller ones leave room for.
    first = int((values <= caps).sum())
    return math.sqrt(float(caps[first]))


def tail_bounds(
    log_ratio: Tensor, *, threshold: float, low: float, high: float, power: float
) -> tuple[Tensor, Tensor]:
    r"""Contract the clip of tokens in the tail of \|log r\|, on the side to which they have moved.

    .. math:: c_t = \frac{1}{1 + (|d_t| / q)^n} \text{ if } |d_t| > q \text{ else } 1, \quad d_t = \log r_t

    SAT (arXiv:2607.18722): where d > 0 the upper half width is multiplied by c, where d < 0 the lower one; q is the
    quantile 0.9 of \|d\|, and n = 2. The form of the kernel is our reading of "Hill kernel".

    Args:
        log_ratio: log current / behaviour [N], nats.
        threshold: q >= 0, nats, over all tokens of the optimizer step. 0: nothing is contracted.
        low, high: half widths of the clip, >= 0.
        power: n > 0.

    Returns:
        Half widths (low [N], high [N]), without gradient.

    Example:
        >>> d = torch.tensor([0.1, 0.4, -0.4])
        >>> tail_bounds(d, threshold=0.2, low=0.2, high=0.2, power=2.0)
        (tensor([0.2000, 0.2000, 0.0400]), tensor([0.2000, 0.0400, 0.2000]))
    """
    moved = log_ratio.detach()
    kernel = torch.ones_like(moved)
    if threshold > 0:
        far = moved.abs() > threshold
        kernel = torch.where(far, 1 / (1 + (moved.abs() / threshold) ** power), 1.0)
    return low * torch.where(moved < 0, kernel, 1.0), high * torch.where(moved > 0, kernel, 1.0)


def quadratic_pull_surrogate(
    ratio: Tensor, advantage: Tensor, logp_behaviour: Tensor, *, bound: float
) -> SurrogateValue:
    r"""Pull tokens back to the behaviour policy by the square of the shift, weighted by the advantage.

    .. math:: r_t A_t - |A_t|\, \mu_t \frac{(r_t - 1)^2}{2 \delta}, \qquad
              \nabla = A_t \Big(1 - \mathrm{sign}(A_t (r_t - 1)) \frac{|\pi - \mu|}{\delta}\Big) r_t \nabla\log\pi

    DRPO (arXiv:2606.09821, equation 9 and table 1): the gradient falls to 0 where the shift of probability reaches δ in
    the direction of the advantage, as DPPO's mask does at once, and turns beyond.

    Args:
        ratio: current / behaviour [N], > 0, with gradient.
        advantage: [N].
        logp_behaviour: log-probabilities [N], nats.
        bound: δ > 0, a probability; the program's 12.5 changes a gradient by at most 8 %.

    Returns:
        (objective [N], clipped: False everywhere).

    Raises:
        ValueError: the bound is not positive, or the shapes differ.

    Example:
        >>> r = torch.tensor([1.5], requires_grad=True)
        >>> value = quadratic_pull_surrogate(r, torch.ones(1), torch.tensor([0.4]).log(), bound=0.2).value
        >>> torch.autograd.grad(value.sum(), r)[0].abs() < 1e-6
        tensor([True])
    """
    check_same_shape(ratio=ratio, advantage=advantage, logp_behaviour=logp_behaviour)
    if bound <= 0:
        raise ValueError(f"bound must be > 0, got {bound}")
    pull = advantage.abs() * logp_behaviour.detach().exp() * (ratio - 1).square() / (2 * bound)
    return unclipped(ratio * advantage - pull)


def gamma_kernel(
    weight: Tensor, advantage: Tensor, *, positive: tuple[float, float], negative: tuple[float, float]
) -> Tensor:
    r"""Shape the importance weight of a whole trajectory like a gamma density, which is 1 at weight 1.

    .. math:: \phi(W) = W^k e^{\lambda (1 - W)}

    VESPO (arXiv:2602.10693), whose program has k, λ = 2, 3 where the advantage is at least 0, and 3, 2 where it is
    negative. Small weights are lowered like a power, large ones exponentially; the peak is at k / λ.

    Args:
        weight: W [N], > 0; the product of the ratios over the trajectory.
        advantage: [N].
        positive: (k, λ), >= 0, where the advantage is at least 0.
        negative: (k, λ), >= 0, where it is negative.

    Returns:
        φ(W) [N], >= 0, without gradient.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> w, a = torch.tensor([1.0, 0.5, 2.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, -1.0])
        >>> gamma_kernel(w, a, positive=(2.0, 3.0), negative=(3.0, 2.0))
        tensor([1.0000, 1.1204, 0.1991, 1.0827])
    """
    check_same_shape(weight=weight, advantage=advantage)
    weight = weight.detach()
    up = advantage >= 0
    power = torch.where(up, positive[0], negative[0])
    rate = torch.where(up, positive[1], negative[1])
    return torch.exp(power * weight.log() + rate * (1 - weight))
