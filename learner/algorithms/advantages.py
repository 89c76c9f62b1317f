"""Advantages: by how much a trajectory, or one of its turns, did better than expected.

All functions compute in numpy and float64, from the returns of whole trajectories. Advantages are constants
for the gradient. Trajectories with equal group ids form a rollout group; their order does not matter. When a
group has lost members, only the members present count: means, medians and deviations are taken over them, and
divisors count them, not the planned group size. The advantage in a group of one is 0, because there is
nothing to compare with. The advantages in a group whose returns are equal up to rounding are exactly 0.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.algorithms.values import monte_carlo_returns
from protocol.arrays import Float64s

STD_EPSILON = 1e-6
"""Number added to a standard deviation before dividing by it."""
VARIANCE_EPSILON = 1e-8
"""Number added to a variance before dividing by its root."""
UNIFORM_SPREAD = 1e-9
"""Values are equal up to rounding if their range is at most this share of the largest size among them, or of
1 where all are smaller than 1."""

Scale = Literal["std", "sample_std", "none"]


# --- one advantage for a trajectory, against its group --------------------------------------------------------


def group_relative_advantage(returns: ArrayLike, groups: Sequence[str], *, scale: Scale) -> Float64s:
    r"""Compute each trajectory's return minus the mean return of its rollout group.

    .. math:: A_i = \frac{R_i - \mathrm{mean}_{j \in g(i)} R_j}{\mathrm{std}_{j \in g(i)} R_j + 10^{-6}}

    GRPO, arXiv:2402.03300, section 4.1.2. ``scale="std"`` divides by the standard deviation with divisor G.
    ``"sample_std"`` divides by the standard deviation with divisor G - 1, as most released programs do, which
    makes advantages smaller by the factor sqrt((G - 1) / G). ``"none"`` does not divide: the Dr. GRPO form,
    arXiv:2503.20783, section 3.2.

    Args:
        returns: [S], one per trajectory.
        groups: group id of each trajectory, length S.
        scale: what to divide by.

    Returns:
        Advantages [S], mean zero in each group; exactly 0 for a group of one and where all returns are equal.

    Raises:
        ValueError: a return is not finite, or the lengths differ.

    Example:
        >>> group_relative_advantage(np.array([1.0, 0.0, 3.0]), ["a", "a", "b"], scale="none").tolist()
        [0.5, -0.5, 0.0]
        >>> group_relative_advantage(np.array([1.0, 0.0, 0.0, 0.0]), ["a"] * 4, scale="std").round(3).tolist()
        [1.732, -0.577, -0.577, -0.577]
    """
    values = _finite("return", returns, len(groups))
    advantages = np.zeros_like(values)
    for rows in _informative_groups(values, groups):
        advantages[rows] = _scaled(values[rows], float(values[rows].mean()), scale)
    return advantages


def leave_one_out_advantage(returns: ArrayLike, groups: Sequence[str]) -> Float64s:
    r"""Compute each trajectory's return minus the mean return of the other members of its group.

    .. math:: A_i = R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j = \frac{G}{G - 1} (R_i - \mathrm{mean}\, R)

    RLOO, arXiv:2402.14740; LOOP, arXiv:2502.01600, section 4. The baseline of a trajectory does not depend on
    that trajectory, so the gradient stays unbiased. G counts the members present.

    Args:
        returns: [S].
        groups: group id of each trajectory, length S.

    Returns:
        Advantages [S], sum zero in each group; 0 for a group of one.

    Raises:
        ValueError: a return is not finite, or the lengths differ.

    Example:
        >>> leave_one_out_advantage([1.0, 0.0, 0.5, 0.5], ["a"] * 4).round(4).tolist()
        [0.6667, -0.6667, 0.0, 0.0]
    """
    values = _finite("return", returns, len(groups))
    advantages = np.zeros_like(values)
    for rows in _informative_groups(values, groups):
        advantages[rows] = (
            _scaled(values[rows], float(values[rows].mean()), "none") * len(rows) / (len(rows) - 1)
        )
    return advantages


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
    values = _finite("return", returns, len(groups))
    advantages = np.zeros_like(values)
    for rows in _informative_groups(values, groups):
        advantages[rows] = _scaled(values[rows], float(np.median(values[rows])), "sample_std")
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
    one advantage reaches 5 in size. This function does so, too: it falls back to `group_relative_advantage`
    with ``scale="std"``.

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
    values, tokens = _finite("return", returns, len(groups)), _finite("length", lengths, len(groups))
    if (tokens < 0).any() or ceiling <= 0:
        raise ValueError(
            f"shortest length {tokens.min(initial=0)}, ceiling {ceiling}: need lengths >= 0, ceiling > 0"
        )
    here = np.flatnonzero(tokens)
    advantages = np.zeros_like(values)
    for members in _informative_groups(values[here], [groups[i] for i in here]):
        rows = here[members]
        mean = np.average(values[rows], weights=tokens[rows])
        deviation = np.sqrt(np.average((values[rows] - mean) ** 2, weights=tokens[rows]))
        by_token = (values[rows] - mean) / (deviation + STD_EPSILON)
        plain = _scaled(values[rows], float(values[rows].mean()), "std")
        advantages[rows] = plain if np.abs(by_token).max() >= ceiling else by_token
    return advantages


# --- one advantage for a trajectory, against something else ---------------------------------------------------


def batch_mean_advantage(returns: ArrayLike, *, scale: Literal["std", "none"]) -> Float64s:
    r"""Compute each trajectory's return minus the mean return of the whole batch, whatever its group.

    .. math:: A_i = \frac{R_i - \mathrm{mean}_j R_j}{\mathrm{std}_j R_j + 10^{-6}}

    REINFORCE with a batch baseline. ``scale="std"`` normalises over the batch (divisor S), as in REINFORCE++,
    arXiv:2501.03262. This needs no groups, but an easy task then looks like a good policy.

    Args:
        returns: [S].
        scale: what to divide by.

    Returns:
        Advantages [S], mean zero; all 0 where the returns are equal or there is only one.

    Raises:
        ValueError: a return is not finite.

    Example:
        >>> batch_mean_advantage([2.0, 0.0, 1.0], scale="none").tolist()
        [1.0, -1.0, 0.0]
    """
    values = _finite("return", returns)
    return group_relative_advantage(values, [""] * len(values), scale=scale)


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
    values = _finite("return", returns)
    baseline = np.asarray(baselines, dtype=np.float64)
    if np.isnan(baseline).any():
        raise ValueError(
            f"trajectory {int(np.isnan(baseline).argmax())} has no baseline: add its greedy response"
        )
    return values - _finite("baseline", baseline, len(values))


# --- one advantage for a turn, or a token ---------------------------------------------------------------------


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
    return monte_carlo_returns(_finite("reward", rewards), discount=discount)


def turn_return_advantage(
    returns: Sequence[Float64s], groups: Sequence[str], *, baseline: Literal["none", "group"]
) -> list[Float64s]:
    r"""Compute the return from each turn on, minus the group's mean at that turn.

    .. math:: A_{i,j} = G_{i,j} - \mathrm{mean}_{k \in g(i), J_k > j} G_{k,j}

    ``baseline="none"`` subtracts nothing, as in arXiv:2512.24873. With ``"group"`` the mean is taken over the
    members that have a turn at that position. A turn that no other member reaches has nothing to be compared
    with and gets 0.

    Args:
        returns: returns from each turn on, [J_i] for each trajectory, see `turn_returns`; J_i may be 0.
        groups: group id of each trajectory.
        baseline: what to subtract.

    Returns:
        Advantages, [J_i] for each trajectory, in new arrays.

    Raises:
        ValueError: a return is not finite, or the lengths differ.

    Example:
        >>> rows = turn_return_advantage([np.array([1.0, 1.0]), np.array([0.0])], ["a", "a"], baseline="group")
        >>> [row.tolist() for row in rows]
        [[0.5, 0.0], [-0.5]]
    """
    if len(returns) != len(groups):
        raise ValueError(f"{len(groups)} group ids for the turn returns of {len(returns)} trajectories")
    if baseline == "none":
        return [_finite("turn return", row).copy() for row in returns]
    rows = [_finite("turn return", row) for row in returns]
    # Each turn position of a group is treated as a separate group.
    places = [f"{j} {group}" for row, group in zip(rows, groups, strict=True) for j in range(len(row))]
    centred = group_relative_advantage(np.concatenate([np.zeros(0), *rows]), places, scale="none")
    return np.split(centred, np.cumsum([len(row) for row in rows]))[: len(rows)]


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
    masked = _finite("masked value", everything[inside])
    whitened = np.zeros_like(everything)
    if not _uniform(masked):
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
    informative = len(_informative_groups(_finite("return", returns, len(groups)), groups))
    return len(set(groups)) / informative if informative else 1.0


# --- shared ---------------------------------------------------------------------------------------------------


def _finite(what: str, numbers: ArrayLike, length: int | None = None) -> Float64s:
    """Convert to float64 [S]. Raise if a number is not finite or the length is wrong."""
    array = np.asarray(numbers, dtype=np.float64)
    if array.ndim != 1 or length not in (None, len(array)):
        raise ValueError(f"{what}s of shape {array.shape}, should be one for each of {length} trajectories")
    if not np.isfinite(array).all():
        raise ValueError(f"{what} {int((~np.isfinite(array)).argmax())} is not finite")
    return array


def _uniform(values: Float64s) -> bool:
    """Return whether all values are equal up to rounding."""
    return not len(values) or bool(np.ptp(values) <= UNIFORM_SPREAD * max(1.0, float(np.abs(values).max())))


def _informative_groups(values: Float64s, groups: Sequence[str]) -> list[NDArray[np.intp]]:
    """Return the rows of each group whose members differ."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return [np.array(rows) for rows in members.values() if not _uniform(values[rows])]


def _scaled(values: Float64s, centre: float, scale: Scale) -> Float64s:
    centred: Float64s = values - centre
    if scale != "none":
        centred /= values.std(ddof=1 if scale == "sample_std" else 0) + STD_EPSILON
    return centred
