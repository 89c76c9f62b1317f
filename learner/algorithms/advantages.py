"""Advantages: by how much a trajectory, or one of its turns, did better than expected.

`learner.algorithms.comparisons` has the advantages that compare values with the mean of others.

All functions compute in numpy and float64, from the returns of whole trajectories. Advantages are constants
for the gradient. Trajectories with equal group ids form a rollout group; their order does not matter. When a
group has lost members, only the members present count: means, medians and deviations are taken over them, and
divisors count them, not the planned group size. The advantage in a group of one is 0, because there is
nothing to compare with. The advantages in a group whose returns are equal up to rounding are exactly 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from learner.algorithms.comparisons import STD_EPSILON, finite, informative_keys, scaled, uniform
from protocol.arrays import Float64s

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
    `learner.algorithms.comparisons.compare` with ``scale="std"``.

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
