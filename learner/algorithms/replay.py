"""Rules of replay: which stored rollouts are trained again, how many of them, and with what advantage.

Selectors return log-weights [M], one for each of M stored items. `selection_probabilities` turns them into
probabilities; an item with log-weight -inf is never drawn. The weights stay in log space so that sharp rules
(a difficulty temperature of 1e-3) do not underflow to "nothing can be drawn".
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from learner.algorithms.tokens import check_same_shape
from protocol.arrays import Float64s

ROUNDING = 1e-9
"""Largest distance below a whole number at which a sum of shares counts as that number."""


def uniform_logits(count: int) -> Float64s:
    """Weight all items equally.

    Args:
        count: number of items, >= 0.

    Returns:
        Log-weights [M].

    Example:
        >>> selection_probabilities(uniform_logits(4)).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    return np.zeros(count)


def recent_logits(lags: ArrayLike, *, max_lag: int) -> Float64s:
    r"""Prefer items of the newest policies, and exclude items that lag too far behind.

    .. math:: w_i = N + 1 - \mathrm{lag}_i \quad (0 \le \mathrm{lag}_i \le N)

    ReMix (arXiv:2507.06892) draws replayed items from the last N policies; the paper does not give the
    distribution inside that window. Linear weights are our choice: the whole window is in use, and an item
    fades out instead of falling off its edge.

    Args:
        lags: [M], versions, >= 0.
        max_lag: N, versions, >= 0; older items get -inf.

    Returns:
        Log-weights [M].

    Raises:
        ValueError: a lag is negative.

    Example:
        >>> selection_probabilities(recent_logits([0, 1, 2, 3], max_lag=2)).round(4).tolist()
        [0.5, 0.3333, 0.1667, 0.0]
    """
    lag = np.asarray(lags, dtype=np.float64)
    if (lag < 0).any():
        raise ValueError(f"lag {lag.min():g} is negative: an item of a version that does not exist yet")
    return _log(np.maximum(max_lag + 1 - lag, 0.0))


def difficulty_logits(success_rates: ArrayLike, *, target: float, temperature: float) -> Float64s:
    r"""Prefer items whose success rate is near the target.

    .. math:: \log w_i = - |p_i - \alpha| / T

    DOTS chooses prompts by this rule (arXiv:2506.05316; there α = 0.5, T = 1e-3); here it chooses stored
    groups. The group-relative signal is proportional to p (1 - p), which is largest at one half.

    Args:
        success_rates: [M], in [0, 1].
        target: α, in [0, 1].
        temperature: T > 0, in units of success rate.

    Returns:
        Log-weights [M], <= 0.

    Raises:
        ValueError: temperature is not above 0.

    Example:
        >>> rates = [0.0, 0.25, 0.5, 0.75, 1.0]
        >>> selection_probabilities(difficulty_logits(rates, target=0.5, temperature=1e-3)).round(6).tolist()
        [0.0, 0.0, 1.0, 0.0, 0.0]
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, it must be above 0")
    distance: Float64s = np.abs(np.asarray(success_rates, dtype=np.float64) - target)
    return -distance / temperature


def success_logits(returns: ArrayLike, *, threshold: float) -> Float64s:
    """Weight all items that succeeded equally, and exclude all others.

    ARPO (arXiv:2505.16282) draws uniformly from the successes of a task: the items with an outcome above 0.1.

    Args:
        returns: [M].
        threshold: a return above it is a success.

    Returns:
        Log-weights [M], 0 or -inf.

    Example:
        >>> selection_probabilities(success_logits([0.0, 1.0, 0.1, 0.6], threshold=0.1)).tolist()
        [0.0, 0.5, 0.0, 0.5]
    """
    return _log((np.asarray(returns, dtype=np.float64) > threshold).astype(np.float64))


def last_success_logits(returns: ArrayLike, order: ArrayLike, *, threshold: float) -> Float64s:
    """Select the last item that succeeded, and no other.

    RAPO (arXiv:2509.24107, sections 2.2 to 2.5) keeps one trajectory per prompt, the last with a return above
    0.5.

    Args:
        returns: [M], items of one prompt.
        order: [M], when each item was stored; all different.
        threshold: a return above it is a success.

    Returns:
        Log-weights [M], 0 for at most one item, -inf for the others.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> last_success_logits([1.0, 0.9, 0.0], [0, 1, 2], threshold=0.5).tolist()
        [-inf, 0.0, -inf]
    """
    values, places = np.asarray(returns, dtype=np.float64), np.asarray(order, dtype=np.float64)
    check_same_shape(returns=values, order=places)
    success = values > threshold
    place = np.where(success, places, -np.inf)
    return _log((success & (place == place.max(initial=-np.inf))).astype(np.float64))


def advantage_logits(advantages: ArrayLike, recalibrated: ArrayLike) -> Float64s:
    r"""Select items that were better than their group, and are still better than is usual now.

    .. math:: w_i = 1[A_i > 0 \wedge \tilde A_i > 0]

    This is the gate of SPEAR (arXiv:2509.22601).

    Args:
        advantages: [M], advantage A from when the item was sampled.
        recalibrated: [M], advantage against what is usual now, see `advantage_recalibrated`.

    Returns:
        Log-weights [M], 0 or -inf.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> advantage_logits([0.5, 0.5, -0.5], [0.2, 0.0, 0.2]).tolist()
        [0.0, -inf, -inf]
    """
    then, now = np.asarray(advantages, dtype=np.float64), np.asarray(recalibrated, dtype=np.float64)
    check_same_shape(advantages=then, recalibrated=now)
    return _log(((then > 0) & (now > 0)).astype(np.float64))


def selection_probabilities(logits: ArrayLike) -> Float64s:
    """Return the probability of each item to be drawn next.

    Args:
        logits: log-weights [M], -inf for items that are never drawn.

    Returns:
        Probabilities [M] that sum to 1; all 0 where nothing can be drawn.

    Example:
        >>> selection_probabilities([0.0, math.log(3.0), -math.inf]).round(6).tolist()
        [0.25, 0.75, 0.0]
    """
    values = np.asarray(logits, dtype=np.float64)
    if not (values > -np.inf).any():
        return np.zeros_like(values)
    weights: Float64s = np.exp(values - values.max())
    probabilities: Float64s = weights / weights.sum()
    return probabilities


def choose(logits: ArrayLike, count: int, rng: np.random.Generator) -> list[int]:
    """Draw items one by one, without replacement, with `selection_probabilities` of the remaining items.

    The Gumbel top-k trick (arXiv:1903.06059) takes the largest of ``logits + Gumbel noise``. The draws have
    exactly this distribution, and no probability needs to be above zero in floating point.

    Args:
        logits: log-weights [M], -inf for items that are never drawn.
        count: number of items to draw, >= 0.
        rng: source of randomness; M numbers are drawn from it, whatever ``count`` is.

    Returns:
        Indices in the order drawn; fewer than ``count`` where no more can be drawn.

    Raises:
        ValueError: count is negative.

    Example:
        >>> sorted(choose([0.0, -math.inf, 0.0], 5, np.random.default_rng(0)))
        [0, 2]
    """
    if count < 0:
        raise ValueError(f"cannot draw {count} items")
    values = np.asarray(logits, dtype=np.float64)
    keys = values + rng.gumbel(size=len(values))
    ranked = np.argsort(-keys, kind="stable")[:count]
    return [int(i) for i in ranked if values[i] > -np.inf]


def advantage_recalibrated(return_: ArrayLike, baselines: Sequence[float]) -> Float64s:
    r"""Compute by how much a return exceeds what is usual now.

    .. math:: \tilde A = R - \mathrm{median}(D_R)

    SPEAR (arXiv:2509.22601): D_R are the mean returns of recent groups. The difference is not divided by a
    standard deviation. The released code can multiply the stored advantage by a decay instead; the median is
    its recommended setting and ours.

    Args:
        return_: [M] or a number.
        baselines: mean returns of recent groups, at least one.

    Returns:
        Advantages in the shape of ``return_``.

    Raises:
        ValueError: there are no baselines.

    Example:
        >>> advantage_recalibrated([1.0, 0.0], [0.0, 0.0, 1.0]).tolist()
        [1.0, 0.0]
    """
    if not len(baselines):
        raise ValueError("no baselines to compare a return with; note the mean return of a group first")
    return np.asarray(return_, dtype=np.float64) - float(np.median(np.asarray(baselines, dtype=np.float64)))


def replay_quota_beside(share: float, fresh: int, carry: float) -> tuple[int, float]:
    r"""Return how many items to replay beside fresh ones, so that the share is exact over many batches.

    .. math:: n_k = \lfloor \tfrac{p}{1 - p} F + c_{k-1} \rfloor

    ReMix draws each item from the past with probability p (arXiv:2507.06892). The carry keeps the mean and
    removes the variance: the sum of quotas is always within one item of what the share asks for.

    Args:
        share: p, share of replayed items among all, in [0, 1).
        fresh: F, items of the batch that are trained for the first time.
        carry: remainder of the last batch, in [0, 1); 0 at the start.

    Returns:
        (quota, next carry).

    Raises:
        ValueError: share is outside [0, 1).

    Example:
        >>> replay_quota_beside(0.5, 3, 0.0)
        (3, 0.0)
        >>> replay_quota_beside(0.4, 6, 0.0)[0]
        4
    """
    if not 0 <= share < 1:
        raise ValueError(f"share is {share}, it must be at least 0 and below 1")
    return _integer_part(share / (1 - share) * fresh + carry)


def _integer_part(amount: float) -> tuple[int, float]:
    """Split an amount into its whole part and the remainder."""
    whole = math.floor(amount + ROUNDING)
    return whole, max(0.0, amount - whole)


def _log(weights: Float64s) -> Float64s:
    # log 0 = -inf is intended: such an item is never drawn.
    with np.errstate(divide="ignore"):
        logits: Float64s = np.log(weights)
    return logits


def self_imitation_weight(step: int, *, warmup_steps: int, ceiling: float = 1.0) -> float:
    r"""Return the weight of replayed items, which grows while the policy learns what is worth imitating.

    .. math:: \gamma(t) = c\,\frac{1 - \cos(\pi t / T_w)}{2} \quad (t \le T_w), \qquad c \text{ after}

    SPEAR (arXiv:2509.22601): c = 1, T_w = 200.

    Args:
        step: t >= 0, learner steps.
        warmup_steps: T_w >= 0; 0 means no warm-up.
        ceiling: c, the weight after the warm-up.

    Returns:
        A weight in [0, c].

    Example:
        >>> [round(self_imitation_weight(t, warmup_steps=200), 4) for t in (0, 50, 100, 150, 200, 500)]
        [0.0, 0.1464, 0.5, 0.8536, 1.0, 1.0]
    """
    if step >= warmup_steps:
        return ceiling
    return ceiling * (1 - math.cos(math.pi * step / warmup_steps)) / 2


def group_failed(returns: ArrayLike, *, max_std: float = 0.05, max_mean: float = 0.2) -> bool:
    r"""Return whether a group failed completely, so that it has no signal unless a stored success joins it.

    .. math:: \mathrm{std}(R) < 0.05 \wedge \mathrm{mean}(R) < 0.2

    ARPO (arXiv:2505.16282, released code). The standard deviation has divisor G.

    Args:
        returns: [G], at least one.
        max_std: exclusive upper bound of the standard deviation.
        max_mean: exclusive upper bound of the mean.

    Raises:
        ValueError: the group is empty.

    Example:
        >>> group_failed([0.0, 0.0, 0.0]), group_failed([0.0, 0.0, 1.0]), group_failed([1.0, 1.0, 1.0])
        (True, False, False)
    """
    values = np.asarray(returns, dtype=np.float64)
    if not values.size:
        raise ValueError("a group without members has neither failed nor succeeded")
    return bool(values.std() < max_std and values.mean() < max_mean)
