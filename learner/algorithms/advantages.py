"""Advantages: by how much a value is better than what it is compared with. No torch, in float64.

Comparisons: values with equal keys are compared with each other; their order does not matter. Only the values that are
there count: means and deviations are taken over them, and not over a planned number. A value without a second one of
its key is 0 afterwards, because there is nothing to compare it with. Values that are equal up to rounding are exactly 0
afterwards.

Then advantages of trajectories, turns and tokens; those of unfinished trajectories, cut at the end of a window (T-PPO,
arXiv:2506.15050); and risk measures of bundles of tasks (RiskPO, arXiv:2510.00911).
"""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Literal, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.arrays import Float64s

STD_EPSILON = 1e-6
"""Number added to a deviation before dividing by it."""
UNIFORM_SPREAD = 1e-9
"""Values are equal up to rounding if their range is at most this share of the largest size among them, or of
1 where all are smaller than 1."""

Scale = Literal["std", "sample_std", "mean_abs", "rank_normal", "leave_one_out", "none"]


def compare(values: ArrayLike, keys: Sequence[Hashable], *, scale: Scale) -> Float64s:
    r"""Compute each value minus the mean of the values with its key, divided by their deviation.

    .. math:: A_i = \frac{v_i - \mathrm{mean}_{j \in k(i)} v_j}{\mathrm{std}_{j \in k(i)} v_j + 10^{-6}}

    With returns as values and rollout groups as keys this is the advantage of GRPO, arXiv:2402.03300, section
    4.1.2. The scale says what is divided by:

    - "std": the standard deviation with divisor G, the number of values with this key.
    - "sample_std": the standard deviation with divisor G - 1, as most released programs have it, which makes
      advantages smaller by the factor sqrt((G - 1) / G).
    - "mean_abs": the mean absolute deviation; the sizes of a key's advantages then add up to G (DGPO,
      arXiv:2601.20614).
    - "none": nothing is divided, the Dr. GRPO form, arXiv:2503.20783, section 3.2.
    - "leave_one_out": nothing is divided, and the baseline is the mean of the *other* values, so the gradient stays
      unbiased: :math:`A_i = \frac{G}{G - 1} (v_i - \mathrm{mean}\, v)` (RLOO, arXiv:2402.14740; LOOP,
      arXiv:2502.01600, section 4).
    - "rank_normal": the result is the normal quantile :math:`\Phi^{-1}((j - 0.5) / G)` of the value's rank j from
      1 to G; equal values share the mean of their quantiles (G2RPO, arXiv:2604.08539). Only the order of the values
      counts.

    Args:
        values: [M], one per unit that is compared: a trajectory, or a turn.
        keys: key of each unit, length M, for example the id of its rollout group.
        scale: what to divide by.

    Returns:
        Advantages [M], in the unit of the values with "none" and "leave_one_out", else without unit. They sum to
        zero over each key.

    Raises:
        ValueError: a value is not finite, or the lengths differ.

    Example:
        >>> compare([1.0, 0.0, 3.0], ["a", "a", "b"], scale="none").tolist()
        [0.5, -0.5, 0.0]
        >>> compare([1.0, 0.0, 0.0, 0.0], ["a"] * 4, scale="std").round(3).tolist()
        [1.732, -0.577, -0.577, -0.577]
        >>> compare([1.0, 0.0, 0.0, 0.0], ["a"] * 4, scale="mean_abs").round(3).tolist()
        [2.0, -0.667, -0.667, -0.667]
        >>> compare([1.0, 0.0, 0.5, 0.5], ["a"] * 4, scale="leave_one_out").round(4).tolist()
        [0.6667, -0.6667, 0.0, 0.0]
        >>> compare([0.0, 0.0, 7.0], ["a"] * 3, scale="rank_normal").round(3).tolist()
        [-0.484, -0.484, 0.967]
    """
    numbers = finite("value", values, len(keys))
    advantages = np.zeros_like(numbers)
    for rows in informative_keys(numbers, keys):
        advantages[rows] = scaled(numbers[rows], float(numbers[rows].mean()), scale)
    return advantages


def spread(values: ArrayLike, keys: Sequence[Hashable], *, scale: Scale) -> Float64s:
    """Return the deviation by which `compare` would divide each value, [M]; 0 where a key's values are equal.

    Raises:
        ValueError: a value is not finite, the lengths differ, or the scale divides by no deviation.

    Example:
        >>> spread([1.0, 0.0, 3.0], ["a", "a", "b"], scale="std").tolist()
        [0.5, 0.5, 0.0]
    """
    numbers = finite("value", values, len(keys))
    deviations = np.zeros_like(numbers)
    for rows in informative_keys(numbers, keys):
        deviations[rows] = deviation(numbers[rows], scale)
    return deviations


def has_peers(keys: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Return for each unit whether a second one has its key, [M].

    Example:
        >>> has_peers(["a", "b", "a"]).tolist()
        [True, False, True]
    """
    counts: dict[Hashable, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return np.array([counts[key] > 1 for key in keys], dtype=np.bool_)


def finite(what: str, numbers: ArrayLike, length: int | None = None) -> Float64s:
    """Convert to float64 [M]. Raise ValueError if a number is not finite or the length is wrong.

    Example:
        >>> finite("return", [1, 2]).tolist()
        [1.0, 2.0]
    """
    array = np.asarray(numbers, dtype=np.float64)
    if array.ndim != 1 or length not in (None, len(array)):
        raise ValueError(f"{what}s of shape {array.shape}, should be one for each of {length} trajectories")
    if not np.isfinite(array).all():
        raise ValueError(f"{what} {int((~np.isfinite(array)).argmax())} is not finite")
    return array


def uniform(values: Float64s) -> bool:
    """Return whether all values are equal up to rounding.

    Example:
        >>> uniform(np.array([0.3, 0.1 + 0.2])), uniform(np.array([0.3, 0.4]))
        (True, False)
    """
    return not len(values) or bool(np.ptp(values) <= UNIFORM_SPREAD * max(1.0, float(np.abs(values).max())))


def informative_keys(values: Float64s, keys: Sequence[Hashable]) -> list[NDArray[np.intp]]:
    """Return the rows of each key whose values differ.

    Example:
        >>> [rows.tolist() for rows in informative_keys(np.array([1.0, 5.0, 0.0, 5.0]), ["a", "b", "a", "b"])]
        [[0, 2]]
    """
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return [np.array(rows) for rows in members.values() if not uniform(values[rows])]


def scaled(values: Float64s, centre: float, scale: Scale) -> Float64s:
    """Return the values of one key minus their centre, divided by their deviation.

    Example:
        >>> scaled(np.array([3.0, 1.0]), 2.0, "leave_one_out").tolist()
        [2.0, -2.0]
    """
    if scale == "rank_normal":
        return _normal_quantiles(values)
    centred: Float64s = values - centre
    if scale == "leave_one_out":
        return centred * len(values) / (len(values) - 1)
    if scale != "none":
        centred /= deviation(values, scale) + STD_EPSILON
    return centred


def deviation(values: Float64s, scale: Scale) -> float:
    """Return the deviation of the values of one key.

    Raises:
        ValueError: the scale divides by no deviation.

    Example:
        >>> deviation(np.array([0.0, 0.0, 0.0, 1.0]), "sample_std"), deviation(np.array([0.0, 1.0]), "mean_abs")
        (0.5, 0.5)
    """
    match scale:
        case "std" | "sample_std":
            return float(values.std(ddof=1 if scale == "sample_std" else 0))
        case "mean_abs":
            return float(np.abs(values - values.mean()).mean())
        case "none" | "leave_one_out" | "rank_normal":
            raise ValueError(
                f'scale "{scale}" divides by no deviation; use "std", "sample_std" or "mean_abs"'
            )
        case _:
            assert_never(scale)


def _normal_quantiles(values: Float64s) -> Float64s:
    """Return the normal quantile of each value's rank; values that are equal up to rounding share a mean."""
    size, normal = len(values), NormalDist()
    order = np.argsort(values, kind="stable")
    quantiles = np.array([normal.inv_cdf((j + 0.5) / size) for j in range(size)])
    apart = np.diff(values[order]) > UNIFORM_SPREAD * max(1.0, float(np.abs(values).max()))
    tie = np.concatenate([[0], np.cumsum(apart)])
    means = np.bincount(tie, weights=quantiles) / np.bincount(tie)
    result = np.empty(size)
    result[order] = means[tie]
    return result


VARIANCE_EPSILON = 1e-8
"""Number added to a variance before dividing by its root."""


# --- one advantage for a trajectory, against its group --------------------------------------------------------


def median_relative_advantage(returns: ArrayLike, groups: Sequence[str]) -> Float64s:
    r"""Compute each trajectory's return minus the median return of its group, over the standard deviation.

    .. math:: z_i = \frac{R_i - \mathrm{median}_{j \in g(i)} R_j}{\mathrm{std}_{j \in g(i)} R_j + 10^{-6}}

    GBPO, arXiv:2604.18578; the sign decides towards which bound a ratio is drawn. The median of an even
    number of returns is midway between the two middle ones; the deviation has divisor G - 1. For a group of
    one the released program takes median 0 and deviation 1, so that the advantage is the return itself. Here
    it is 0, as everywhere in this file: a lone member must not be reinforced merely because its return is
    positive.

    Args:
        returns: [S].
        groups: group id of each trajectory, length S.

    Returns:
        Advantages [S]. In each group at least half are not above 0, and at least half are not below 0.

    Raises:
        ValueError: a return is not finite, or the lengths differ.

    Example:
        >>> median_relative_advantage([0.0, 0.0, 0.0, 1.0], ["a"] * 4).round(3).tolist()
        [0.0, 0.0, 0.0, 2.0]
    """
    values = finite("return", returns, len(groups))
    advantages = np.zeros_like(values)
    for rows in informative_keys(values, groups):
        advantages[rows] = scaled(values[rows], float(np.median(values[rows])), "sample_std")
    return advantages


def token_group_advantage(
    returns: ArrayLike, lengths: ArrayLike, groups: Sequence[str], *, ceiling: float = 5.0
) -> Float64s:
    r"""Compute each trajectory's return minus the mean over the tokens of its group.

    .. math::
        A_i = \frac{R_i - \mu}{\sigma + 10^{-6}}, \qquad
        \mu = \frac{\sum_j T_j R_j}{\sum_j T_j}, \quad
        \sigma^2 = \frac{\sum_j T_j (R_j - \mu)^2}{\sum_j T_j}

    HAPO, arXiv:2509.16591, token-level group average. These advantages sum to zero over the tokens of a
    group; the advantages of GRPO sum to zero over its members. Where one member holds nearly all tokens, the
    advantages of the others grow without bound. The released program falls back to GRPO for a group in which
    one advantage reaches 5 in size. This function does so, too: it falls back to
    `learner.algorithms.advantages.compare` with ``scale="std"``.

    Args:
        returns: [S].
        lengths: action tokens of each trajectory, [S], >= 0. A trajectory without tokens is left out and gets
            advantage 0.
        groups: group id of each trajectory, length S.
        ceiling: size of an advantage at which its group falls back to GRPO, > 0.

    Returns:
        Advantages [S].

    Raises:
        ValueError: a return or a length is not finite, a length is negative, the ceiling is not positive, or
            the arguments differ in length.

    Example:
        >>> token_group_advantage([1.0, 0.0], [2, 6], ["a", "a"]).round(3).tolist()
        [1.732, -0.577]
    """
    values, tokens = finite("return", returns, len(groups)), finite("length", lengths, len(groups))
    if (tokens < 0).any() or ceiling <= 0:
        raise ValueError(
            f"shortest length {tokens.min(initial=0)}, ceiling {ceiling}: need lengths >= 0, ceiling > 0"
        )
    here = np.flatnonzero(tokens)
    advantages = np.zeros_like(values)
    for members in informative_keys(values[here], [groups[i] for i in here]):
        rows = here[members]
        mean = np.average(values[rows], weights=tokens[rows])
        deviation = np.sqrt(np.average((values[rows] - mean) ** 2, weights=tokens[rows]))
        by_token = (values[rows] - mean) / (deviation + STD_EPSILON)
        plain = scaled(values[rows], float(values[rows].mean()), "std")
        advantages[rows] = plain if np.abs(by_token).max() >= ceiling else by_token
    return advantages


# --- one advantage for a trajectory, against something else ---------------------------------------------------


def greedy_baseline_advantage(returns: ArrayLike, baselines: ArrayLike) -> Float64s:
    r"""Compute each trajectory's return minus the return of the greedy response: :math:`A_i = R_i - b_i`.

    ReMax, arXiv:2310.10505. The baseline does not depend on what was sampled, so the gradient stays unbiased
    even where a different policy version decoded greedily.

    Args:
        returns: [S].
        baselines: return of the greedy response to each trajectory's task, [S].

    Returns:
        Advantages [S]; 0 for the greedy responses themselves.

    Raises:
        ValueError: a return or baseline is not finite (the index of the first NaN is named), or the lengths
            differ.

    Example:
        >>> greedy_baseline_advantage([1.0, 0.0], [0.25, 0.25]).tolist()
        [0.75, -0.25]
    """
    values = finite("return", returns)
    baseline = np.asarray(baselines, dtype=np.float64)
    if np.isnan(baseline).any():
        raise ValueError(
            f"trajectory {int(np.isnan(baseline).argmax())} has no baseline: add its greedy response"
        )
    return values - finite("baseline", baseline, len(values))


# --- one advantage for a turn, or a token ---------------------------------------------------------------------


def monte_carlo_returns(rewards: ArrayLike, *, discount: float) -> Float64s:
    r"""Sum the discounted rewards from each step on: value targets that need no critic.

    .. math:: G_t = \sum_{k \ge 0} \gamma^k r_{t+k}

    The targets are right for finished trajectories only. With discount 1 they are the targets of T-PPO
    (arXiv:2506.15050).

    Args:
        rewards: [T].
        discount: gamma, [0, 1], per step.

    Returns:
        Returns [T], float64, in the unit of the rewards.

    Example:
        >>> monte_carlo_returns([0.0, 1.0, 2.0], discount=0.5).tolist()
        [1.0, 2.0, 2.0]
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    returns, running = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + discount * running
        returns[t] = running
    return returns


def turn_returns(rewards: ArrayLike, *, discount: float) -> Float64s:
    r"""Compute the discounted return from each turn on, which all tokens of the turn share.

    .. math:: G_j = \sum_{k \ge j} \gamma^{k - j} r_k

    With one reward at the end this is :math:`\gamma^{J - j} R`: IPA, arXiv:2512.24873. There one step of
    discounting is the text between two calls of the environment, however many tokens it has.

    Args:
        rewards: [J], sum of the rewards in each turn of the policy.
        discount: gamma, (0, 1], per turn.

    Returns:
        Returns [J].

    Raises:
        ValueError: a reward is not finite.

    Example:
        >>> turn_returns([0.0, 0.0, 1.0], discount=0.9).round(3).tolist()
        [0.81, 0.9, 1.0]
    """
    return monte_carlo_returns(finite("reward", rewards), discount=discount)


def whiten(values: ArrayLike, mask: ArrayLike) -> Float64s:
    r"""Scale values to mean 0 and variance 1 over the mask, and set them to 0 outside it.

    .. math:: \hat v_t = \frac{v_t - \mathrm{mean}(v)}{\sqrt{\mathrm{var}(v) + 10^{-8}}}

    PPO implementations whiten the advantages of all policy tokens of a batch in this way. The variance
    divides by the number of tokens. The addend keeps values that differ by far less than 1e-4, for example in
    a batch where every task is solved, from becoming a step of full size; verl and TRL have it, too. Values
    that are equal up to rounding become 0.

    Args:
        values: [M]; anything outside the mask, NaN included.
        mask: [M], bool.

    Returns:
        Whitened values [M].

    Raises:
        ValueError: a value inside the mask is not finite, or the lengths differ.

    Example:
        >>> whiten([1.0, 3.0, 9.0], [True, True, False]).round(6).tolist()
        [-1.0, 1.0, 0.0]
    """
    inside = np.asarray(mask, dtype=np.bool_)
    everything = np.asarray(values, dtype=np.float64)
    if everything.shape != inside.shape:
        raise ValueError(f"mask of shape {inside.shape} for values of shape {everything.shape}")
    masked = finite("masked value", everything[inside])
    whitened = np.zeros_like(everything)
    if not uniform(masked):
        whitened[inside] = (masked - masked.mean()) / np.sqrt(masked.var() + VARIANCE_EPSILON)
    return whitened


# --- one factor for the whole batch ---------------------------------------------------------------------------


def informative_scale(returns: ArrayLike, groups: Sequence[str]) -> float:
    r"""Return the factor that makes up for groups without signal: all groups / groups whose returns differ.

    RAPO of Fathom-DeepResearch, arXiv:2509.24107. Advantages multiplied by this factor keep the size of a
    batch's gradient when many groups are all right or all wrong. The paper writes the numerator with the
    letter of the group size; only the number of groups serves that purpose. Without any informative group
    there is no advantage to scale, and the factor is 1. A group of one is not informative.

    Args:
        returns: [S].
        groups: group id of each trajectory, length S.

    Returns:
        A factor of at least 1.

    Raises:
        ValueError: a return is not finite, or the lengths differ.

    Example:
        >>> informative_scale([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
        2.0
    """
    informative = len(informative_keys(finite("return", returns, len(groups)), groups))
    return len(set(groups)) / informative if informative else 1.0


def extended_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    finished: bool,
    discount: float,
    trace: float,
    bootstrap: float | None = None,
) -> NDArray[np.float64]:
    r"""Estimate advantages (GAE) on the window of a response that may go on after it: EGAE.

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
        A_t = \sum_{k=0}^{T-1-t} (\gamma \lambda)^k \delta_{t+k}

    with :math:`V_T = 0` where the response is finished, which is plain GAE (arXiv:1506.02438, equation 16).
    For an unfinished response arXiv:2506.15050 sets :math:`V_T \approx V_{T-1}`, so the last :math:`\delta`
    is :math:`r_{T-1} + (\gamma - 1) V_{T-1}`. That is the default; a critic that has seen the last token can
    give ``bootstrap`` instead. Compared with the complete response, the advantages of the window are off by
    :math:`(\gamma \lambda)^{T-1-t} (\gamma (V_T^{true} - V_T) + \gamma \lambda A_T)`, most at its end. The
    released program negates an integer flag bitwise, which gives the last term the wrong sign for
    :math:`\gamma < 1`. This function follows the formula.

    Args:
        rewards: [T], reward of each action token of the window, in the unit of the return.
        values: [T], value before each of these tokens, in the unit of the return.
        finished: whether the response ended in this window.
        discount: gamma, [0, 1], per token.
        trace: lambda, [0, 1].
        bootstrap: value after the last token of an unfinished window.

    Returns:
        Advantages [T], float64.

    Raises:
        ValueError: the shapes differ, or a finished response has a bootstrap.

    Example:
        >>> extended_gae(np.zeros(3), [0.2, 0.4, 0.5], finished=False, discount=1.0, trace=0.5).round(3).tolist()
        [0.25, 0.1, 0.0]
        >>> extended_gae([0, 0, 1], [0.2, 0.4, 0.5], finished=True, discount=1.0, trace=0.0).round(3).tolist()
        [0.2, 0.1, 0.5]
    """
    rewards, values = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise ValueError(f"rewards {rewards.shape} and values {values.shape}: give one of each per token")
    if finished and bootstrap is not None:
        raise ValueError(f"bootstrap {bootstrap} for a finished response; the value after its end is 0")
    if not len(values):
        return np.zeros(0)
    after = float(values[-1]) if bootstrap is None else bootstrap
    following = np.append(values[1:], 0.0 if finished else after)
    deltas = rewards + discount * following - values
    advantages, running = np.zeros_like(values), 0.0
    for t in reversed(range(len(values))):
        running = deltas[t] + discount * trace * running
        advantages[t] = running
    return advantages


def adaptive_trace(
    length: int, *, unfinished: bool, window: int, alpha: float = 0.05, base: float = 0.95
) -> float:
    r"""Return a lambda that grows with the response, so that the reward at its end reaches its beginning.

    .. math:: \lambda = \max\left(\lambda_0, 1 - \frac{1}{\alpha L}\right), \qquad
        L = \text{length} + \lfloor W / 2 \rfloor \text{ if unfinished, else length}

    This is length-adaptive GAE (arXiv:2504.05118, section 4.2) in the form of T-PPO's program
    (``use_variable_lambda``), which expects an unfinished response to go on for half a window. Alpha 0.05 and
    base 0.95 are the numbers of that program; with them lambda leaves its base at 400 tokens.

    Args:
        length: action tokens so far, over all windows, >= 1.
        unfinished: whether the response goes on after the window.
        window: largest number W of action tokens in a window, >= 0.
        alpha: > 0, per token.
        base: smallest lambda, [0, 1].

    Returns:
        Lambda, in [base, 1).

    Raises:
        ValueError: a length below 1, a negative window, or alpha not above 0.

    Example:
        >>> adaptive_trace(800, unfinished=False, window=512)
        0.975
        >>> adaptive_trace(100, unfinished=True, window=512)
        0.95
    """
    if length < 1 or window < 0 or alpha <= 0:
        raise ValueError(
            f"length {length}, window {window}, alpha {alpha}: need length >= 1, window >= 0, alpha > 0"
        )
    expected = length + (window // 2 if unfinished else 0)
    return max(base, 1 - 1 / (alpha * expected))


def tail_mask(n: int, *, finished: bool, ignore: int = 8) -> NDArray[np.bool_]:
    """Mask the tokens of a window that may carry policy gradient: not the last few of an unfinished window.

    The advantages of `extended_gae` are the most biased there. T-PPO's program (arXiv:2506.15050) leaves out
    8 tokens, and still counts them where it averages over tokens.

    Args:
        n: action tokens in the window.
        finished: whether the response ended in the window; then all tokens stay.
        ignore: number of tokens to leave out, >= 0; a shorter window loses all of its tokens.

    Returns:
        Mask [n], bool, true on tokens to train.

    Raises:
        ValueError: ``n`` or ``ignore`` is negative.

    Example:
        >>> tail_mask(4, finished=False, ignore=1).tolist()
        [True, True, True, False]
        >>> tail_mask(4, finished=True, ignore=1).all().item()
        True
    """
    if n < 0 or ignore < 0:
        raise ValueError(f"window of {n} tokens, {ignore} to ignore: neither may be negative")
    return np.arange(n) < (n if finished else n - ignore)


def risk_advantage(
    scores: ArrayLike,
    *,
    quantiles: tuple[float, float],
    levels: tuple[float, float],
    mix: float,
    natural_baseline: bool = False,
) -> Float64s:
    r"""Compute the advantage of scores that counts the lower tail and the middle of their distribution.

    .. math::
        A_\mathrm{RVaR} &= \frac{(S - q_d)_+ - (S - q_u)_+ \; (+\, q_d - q_u)}{\alpha_u - \alpha_d}, \qquad
        A_\mathrm{CVaR} = -\frac{(q_d - S)_+}{\alpha_d} \\
        A &= \frac{\omega A_\mathrm{CVaR} + A_\mathrm{RVaR}}{\omega + 1}

    RiskPO, arXiv:2510.00911, as in the released program. Scores above the upper quantile gain nothing more.

    Args:
        scores: S [M], sums of rewards of a bundle.
        quantiles: q_d and q_u, running quantiles of the scores.
        levels: alpha_d and alpha_u, 0 < alpha_d < alpha_u <= 1.
        mix: omega, weight of the lower tail, >= 0.
        natural_baseline: whether q_d - q_u is added, so that no score has a positive advantage.

    Returns:
        Advantages [M], in the unit of the scores.

    Example:
        >>> one = {"quantiles": (1.0, 3.0), "levels": (0.2, 0.8), "mix": 1.5}
        >>> risk_advantage([0, 1, 2, 3, 5], **one).round(4).tolist()
        [-3.0, 0.0, 0.6667, 1.3333, 1.3333]
    """
    values = np.asarray(scores, dtype=np.float64)
    (low, high), (lower, upper) = quantiles, levels
    middle = np.maximum(values - low, 0) - np.maximum(values - high, 0)
    if natural_baseline:
        middle = middle + low - high
    tail = -np.maximum(low - values, 0) / lower
    result: Float64s = (mix * tail + middle / (upper - lower)) / (mix + 1)
    return result


def next_quantile(quantile: float, scores: ArrayLike, *, level: float, rate: float) -> float:
    r"""Return a running quantile after one more batch of scores.

    .. math:: q \leftarrow q + \eta \, (\alpha - P(S < q))

    It rests where the share of scores below it is alpha (RiskPO, arXiv:2510.00911; eta = 0.1).

    Example:
        >>> next_quantile(1.0, [0, 2, 2, 2], level=0.5, rate=0.1), next_quantile(1.0, [0, 2], level=0.5, rate=0.1)
        (1.025, 1.0)
    """
    values = np.asarray(scores, dtype=np.float64)
    return float(quantile + rate * (level - float((values < quantile).mean())))


def share_of_paper(differences: ArrayLike, *, most: float = math.inf) -> Float64s:
    r"""Return the share of a paper's advantage that each of its tasks gets; the shares add up to 1.

    .. math:: \frac{r_i - \bar r_i}{\sum_i (r_i - \bar r_i)}

    RiskPO's "sum-mean", arXiv:2510.00911. Where the differences add up to 0, all shares are equal, which is ours.

    Args:
        differences: [Q], reward of each task of the paper minus the mean reward of the task's group.
        most: bound of the size of a share, which is ours. Where it acts, the shares do not add up to 1.

    Example:
        >>> share_of_paper([0.5, -0.25, 0.25]).tolist(), share_of_paper([0.5, -0.5]).tolist()
        ([1.0, -0.5, 0.5], [0.5, 0.5])
        >>> share_of_paper([0.5, -0.499], most=7.0).tolist()
        [7.0, -7.0]
    """
    values = np.asarray(differences, dtype=np.float64)
    total = float(values.sum())
    shares: Float64s = np.full(len(values), 1 / max(1, len(values))) if abs(total) < 1e-6 else values / total
    return shares.clip(-most, most)
