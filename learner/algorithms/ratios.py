"""Importance ratios between policies, formed in log space."""

from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from learner.algorithms.tokens import Level, check_same_shape

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to ±20 (a ratio of 4.9e8), because a float32 product of ratio and advantage may
overflow beyond it."""


def importance_ratio(logp_numerator: Tensor, logp_denominator: Tensor) -> Tensor:
    r"""Compute how much likelier each sampled token is under policy a than under policy b.

    .. math:: r_t = \exp(\mathrm{clamp}(\log \pi_a(a_t|s_t) - \log \pi_b(a_t|s_t), \pm 20))

    Args:
        logp_numerator: log-probabilities [N], nats, of the tokens under policy a.
        logp_denominator: log-probabilities [N], nats, of these tokens under policy b.

    Returns:
        Ratios [N] in [2e-9, 5e8]. Gradient flows to both arguments, and is zero where the clamp acts.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> importance_ratio(torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log())
        tensor([2.0000, 0.5000])
    """
    return _ratio(_log_ratio(logp_numerator, logp_denominator))


def segment_mean(values: Tensor, segment: Tensor) -> Tensor:
    r"""Give each token the mean over all tokens of its segment.

    .. math:: \bar v_t = \frac{1}{|S_t|} \sum_{s \in S_t} v_s, \quad S_t = \{s : g_s = g_t\}

    Args:
        values: [N], floating point.
        segment: g, int64 [N], >= 0; equal within a segment. Ids need not be sorted or contiguous.

    Returns:
        Means [N], in the unit and dtype of ``values``. Gradient flows: each token receives the mean gradient
        of its segment.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> segment_mean(torch.tensor([1.0, 10.0, 3.0]), torch.tensor([7, 0, 7]))
        tensor([ 2., 10.,  2.])
    """
    sums, sizes = segment_sums(values, segment)
    return sums / sizes


def segment_ratio(logp_numerator: Tensor, logp_denominator: Tensor, segment: Tensor) -> Tensor:
    r"""Give each token the geometric mean of the importance ratio over all tokens of its segment.

    .. math:: s_t = \exp\Big(\mathrm{clamp}\Big(\frac{1}{|S_t|} \sum_{s \in S_t}
              \log\frac{\pi_a(a_s|s_s)}{\pi_b(a_s|s_s)}, \pm 20\Big)\Big)

    If S is all answers of a rollout group (`learner.algorithm.corrections.level = "group"`), all its tokens
    have one weight. Group-relative advantages then keep their sum of zero, which weights of single tokens or
    answers would break, and a group is kept or rejected as a whole.

    Args:
        logp_numerator: log-probabilities [N], nats, of the tokens under policy a.
        logp_denominator: log-probabilities [N], nats, of these tokens under policy b.
        segment: int64 [N], >= 0; equal within S.

    Returns:
        Ratios [N] in [2e-9, 5e8], equal within S. Gradient flows to the log-probabilities of all tokens of S,
        1/\|S\| each, and is zero where the clamp acts.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a, b = torch.tensor([0.4, 0.4, 0.5]).log(), torch.tensor([0.1, 0.4, 0.5]).log()
        >>> segment_ratio(a, b, torch.tensor([0, 0, 3]))
        tensor([2., 2., 1.])
    """
    return _ratio(segment_mean(_log_ratio(logp_numerator, logp_denominator), segment))


def product_ratio(logp_numerator: Tensor, logp_denominator: Tensor, sequence: Tensor) -> Tensor:
    r"""Give each token the product of the importance ratios of all tokens of its trajectory.

    .. math:: s_t = \exp\Big(\mathrm{clamp}\Big(\sum_{s \in S_t}
              \log\frac{\pi_a(a_s|s_s)}{\pi_b(a_s|s_s)}, \pm 20\Big)\Big)

    This is the ratio of the two policies for the whole trajectory, by which an average over trajectories of b
    becomes one of a, without bias. verl (``rollout_is = "sequence"``) and TRL (``sequence_truncate``,
    ``sequence_mask``) have it as weight. Its variance grows with the length; `segment_ratio` is its root.

    Args:
        logp_numerator: log-probabilities [N], nats, of the tokens under policy a.
        logp_denominator: log-probabilities [N], nats, of these tokens under policy b.
        sequence: int64 [N], >= 0; equal within a trajectory.

    Returns:
        Ratios [N] in [2e-9, 5e8], equal within a trajectory. Gradient flows to the log-probabilities of all its
        tokens, and is zero where the clamp acts.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a, b = torch.tensor([0.4, 0.2, 0.5]).log(), torch.tensor([0.1, 0.4, 0.5]).log()
        >>> product_ratio(a, b, torch.tensor([0, 0, 3])).round(decimals=4)
        tensor([2., 2., 1.])
    """
    log_ratio = _log_ratio(logp_numerator, logp_denominator)
    sums, _ = segment_sums(log_ratio, sequence)
    return _ratio(sums)


def level_ratio(
    logp_numerator: Tensor, logp_denominator: Tensor, *, level: Level, sequence: Tensor, turn: Tensor
) -> Tensor:
    r"""Compute each token's importance ratio, or the geometric mean of the ratio over its turn or sequence.

    .. math:: s_t = \exp\Big(\mathrm{clamp}\Big(\frac{1}{|S_t|} \sum_{s \in S_t}
              \log\frac{\pi_a(a_s|s_s)}{\pi_b(a_s|s_s)}, \pm 20\Big)\Big)

    If S is the sequence, this is the ratio of GSPO (arXiv:2507.18071, equation 7). It is normalised by
    length, so one clip range serves short and long answers (3e-4 and 4e-4 wide in the paper). If S is the
    turn, it is the chunk ratio of IPA (arXiv:2512.24873). With one token per turn, or one turn per sequence,
    the levels coincide.

    Args:
        logp_numerator: log-probabilities [N], nats, of the tokens under policy a.
        logp_denominator: log-probabilities [N], nats, of these tokens under policy b.
        level: stretch of text that S covers; ``token`` is `importance_ratio`.
        sequence: int64 [N], equal within a trajectory.
        turn: int64 [N], equal within a turn, different in different trajectories.

    Returns:
        Ratios [N] in [2e-9, 5e8], equal within S. Gradient flows to the log-probabilities of *all* tokens of
        S, 1/\|S\| each, and is zero where the clamp acts. Where all tokens of S have one advantage, this is
        the gradient of GSPO.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a, b = torch.tensor([0.4, 0.4, 0.5]).log(), torch.tensor([0.1, 0.4, 0.5]).log()
        >>> row, turn = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2])
        >>> level_ratio(a, b, level="sequence", sequence=row, turn=turn)
        tensor([2., 2., 1.])
        >>> level_ratio(a, b, level="turn", sequence=row, turn=turn)
        tensor([4., 1., 1.])
    """
    check_same_shape(
        logp_numerator=logp_numerator, logp_denominator=logp_denominator, sequence=sequence, turn=turn
    )
    match level:
        case "token":
            return importance_ratio(logp_numerator, logp_denominator)
        case "turn":
            segment = turn
        case "sequence":
            segment = sequence
        case _:
            assert_never(level)
    return segment_ratio(logp_numerator, logp_denominator, segment)


def interpolated_proximal(
    logp_behaviour: Tensor,
    logp_current: Tensor,
    lag: Tensor,
    *,
    fresh: Literal["current", "behaviour"] = "current",
) -> Tensor:
    r"""Interpolate the proximal policy between behaviour and current policy by lag, without a forward pass.

    .. math:: \log \pi_\mathrm{prox} = \tfrac{1}{d_t} \log \mu + (1 - \tfrac{1}{d_t}) \log \pi_\theta,
              \quad d_t \ge 1

    A-3PO (arXiv:2512.06547) assumes that policies move evenly from version to version in log space, and that
    the proximal policy is one version behind the current policy. At lag 1 it is the behaviour policy.

    At lag 0 there is nothing to interpolate. ``current`` (the default) takes the current policy: the ratio is
    1, so nothing restrains fresh tokens, which is right for one update per batch. ``behaviour``, as in the
    released program of AReaL, is plain PPO for fresh tokens; choose it for several updates per batch.

    Args:
        logp_behaviour: log-probabilities [N] of the tokens under the behaviour policy, nats.
        logp_current: log-probabilities [N] of the tokens under the current policy, nats.
        lag: d [N], versions, integers >= 0 in any dtype.
        fresh: the proximal policy at lag 0.

    Returns:
        Log-probabilities [N], nats, between the two, without gradient.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> b, c = torch.full((4,), -3.0), torch.full((4,), -1.0)
        >>> interpolated_proximal(b, c, torch.tensor([0, 1, 2, 4]))
        tensor([-1.0000, -3.0000, -2.0000, -1.5000])
    """
    check_same_shape(logp_behaviour=logp_behaviour, logp_current=logp_current, lag=lag)
    current, behaviour = logp_current.detach(), logp_behaviour.detach()
    share = 1 / lag.to(current.dtype).clamp(min=1)
    if fresh == "current":
        share = torch.where(lag > 0, share, 0)
    return torch.lerp(current, behaviour, share)


def effective_sample_size(weights: Tensor) -> Tensor:
    r"""Return the effective share of tokens under importance weights (Kish; Owen, Monte Carlo, section 9.3).

    .. math:: \mathrm{ESS} / N = (\sum_t w_t)^2 / (N \sum_t w_t^2)

    Args:
        weights: [N], non-negative, N >= 1.

    Returns:
        A scalar in [1/N, 1]; 1 when all weights are equal. Scaling all weights does not change it.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.5000)
    """
    weights = weights.double()
    return (weights.sum().square() / (len(weights) * weights.square().sum())).float()


def learning_rate_factor(
    effective_sample_share: float, *, rule: Literal["linear", "sqrt"] = "linear"
) -> float:
    r"""Return the factor that lowers the learning rate for a batch of stale tokens.

    .. math:: \mathrm{ESS}/N \ \text{(linear)}, \quad \sqrt{\mathrm{ESS}/N} \ \text{(sqrt)}

    VCPO (arXiv:2602.17616) scales the rate with the effective sample size, as is usual with the batch size.
    Linear (the default) suits gradients that are used as they are, and is the more cautious rule. The paper's
    program takes the root for optimizers that divide by the size of the gradient, like Adam.

    Args:
        effective_sample_share: from `effective_sample_size`, over all tokens of the update on all ranks.
        rule: ``linear`` or ``sqrt``.

    Returns:
        A factor in (0, 1]; 1 when all weights are equal.

    Raises:
        ValueError: the share is not in (0, 1].

    Example:
        >>> learning_rate_factor(0.25), learning_rate_factor(0.25, rule="sqrt")
        (0.25, 0.5)
    """
    if not 0 < effective_sample_share <= 1 + 1e-6:
        raise ValueError(f"effective sample share must be in (0, 1], got {effective_sample_share}")
    share = min(effective_sample_share, 1.0)
    return share if rule == "linear" else share**0.5


def segment_sums(values: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Give each token the sum over its segment, and the number of the segment's tokens, [N] each."""
    row = segment_ranks(values, segment)
    zeros = torch.zeros_like(values)
    sums = zeros.index_add(0, row, values)
    sizes = zeros.index_add(0, row, torch.ones_like(values))
    return sums[row], sizes[row]


def segment_ranks(values: Tensor, segment: Tensor) -> Tensor:
    """Number the segments in the order of their ids, and return the number of each token's segment, int64 [N]."""
    if values.shape != segment.shape:
        raise ValueError(
            f"every value needs the id of its segment, got {tuple(values.shape)} and {tuple(segment.shape)}"
        )
    # Unlike `torch.unique`, a sort does not make the host wait for a GPU. There are at most as many segments as tokens.
    ids, order = segment.sort()
    number = (ids.diff(prepend=ids[:1]) != 0).cumsum(0)
    return torch.empty_like(order).scatter_(0, order, number)


def _log_ratio(logp_numerator: Tensor, logp_denominator: Tensor) -> Tensor:
    if logp_numerator.shape != logp_denominator.shape:
        raise ValueError(
            f"log-probabilities must have one shape, got {tuple(logp_numerator.shape)} "
            f"and {tuple(logp_denominator.shape)}"
        )
    return logp_numerator - logp_denominator


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


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
