"""Advantages: how much better a trajectory, or a turn of it, did than was to be expected.

Numpy, float64, from the returns of whole trajectories; constants for the gradient. Trajectories with equal
group ids form a rollout group, in whatever order they stand. A group that lost members is judged by those that
are here: means, medians and deviations are taken over them, and divisors count them, not the members the group
was meant to have. A group of one has nothing to be compared with: its advantage is 0. So is, exactly, that of a
group whose returns are equal but for rounding.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.algorithms.values import monte_carlo_returns
from protocol.arrays import Float64s

STD_EPSILON = 1e-6
UNIFORM_SPREAD = 1e-9

Scale = Literal["std", "sample_std", "none"]


# --- one advantage for a trajectory, against its group --------------------------------------------------------


def group_relative_advantage(returns: ArrayLike, groups: Sequence[str], *, scale: Scale) -> Float64s:
    r"""Return of each trajectory against the mean of its rollout group.

    .. math:: A_i = \frac{R_i - \mathrm{mean}_{j \in g(i)} R_j}{\mathrm{std}_{j \in g(i)} R_j + 10^{-6}}

    GRPO, arXiv:2402.03300, section 4.1.2. ``scale="std"``: the standard deviation of the group itself, divided
    by G; ``"sample_std"``: divided by G - 1, as most released programs have it, which makes advantages smaller
    by sqrt((G - 1) / G); ``"none"``: no division, the Dr. GRPO form, arXiv:2503.20783, section 3.2.

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
    r"""Return of each trajectory against the mean of the others of its group.

    .. math:: A_i = R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j = \frac{G}{G - 1} (R_i - \mathrm{mean}\, R)

    RLOO, arXiv:2402.14740; LOOP, arXiv:2502.01600, section 4. The baseline does not depend on the trajectory it
    is taken from, so it leaves the gradient unbiased. G counts the members present.

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
    r"""Return of each trajectory against the median of its group.

    .. math:: z_i = \frac{R_i - \mathrm{median}_{j \in g(i)} R_j}{\mathrm{std}_{j \in g(i)} R_j + 10^{-6}}

    GBPO, arXiv:2604.18578: its sign says to which bound a ratio is drawn. The median of an even number is
    midway between the two in the middle; the deviation divides by G - 1. For a group of one the released
    program takes median 0 and deviation 1, which makes the advantage the return itself; here it is 0, as
    everywhere in this file, lest a lone member be reinforced for no better reason than a positive return.

    Args:
        returns: [S].
        groups: group id of each trajectory, length S.

    Returns:
        Advantages [S]; at least half of each group not above 0, and half not below.

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
    r"""Return of each trajectory against the mean over the tokens of its group.

    .. math::
        A_i = \frac{R_i - \mu}{\sigma + 10^{-6}}, \qquad
        \mu = \frac{\sum_j T_j R_j}{\sum_j T_j}, \quad
        \sigma^2 = \frac{\sum_j T_j (R_j - \mu)^2}{\sum_j T_j}

    HAPO, arXiv:2509.16591, token-level group average: advantages sum to zero over the tokens of a group, where
    those of GRPO do so over its members. Where one member holds nearly all tokens those of the others grow
    without bound; the released program falls back to GRPO for a group in which one reaches 5 in size, and so
    does this, to `group_relative_advantage` with ``scale="std"``.

    Args:
        returns: [S].
        lengths: action tokens of each trajectory, [S], >= 0; one without tokens is left out and gets 0.
        groups: group id of each trajectory, length S.
        ceiling: size of an advantage at which its group falls back, > 0.

    Returns:
        Advantages [S].

    Raises:
        ValueError: a return is not finite, a length or the ceiling is negative, or the lengths differ.

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
    r"""Return of each trajectory against the mean of the whole batch, whatever its group.

    .. math:: A_i = \frac{R_i - \mathrm{mean}_j R_j}{\mathrm{std}_j R_j + 10^{-6}}

    REINFORCE with a batch baseline; normalised over the batch (``scale="std"``, dividing by S) as in
    REINFORCE++, arXiv:2501.03262. Needs no groups, but tasks that are easy look like good policy.

    Args:
        returns: [S].

    Returns:
        Advantages [S], mean zero; all 0 where the returns are equal or there is but one.

    Raises:
        ValueError: a return is not finite.

    Example:
        >>> batch_mean_advantage([2.0, 0.0, 1.0], scale="none").tolist()
        [1.0, -1.0, 0.0]
    """
    values = _finite("return", returns)
    return group_relative_advantage(values, [""] * len(values), scale=scale)


def greedy_baseline_advantage(returns: ArrayLike, baselines: ArrayLike) -> Float64s:
    r"""Return of each trajectory less that of the greedy response to its task: :math:`A_i = R_i - b_i`.

    ReMax, arXiv:2310.10505. The baseline does not depend on what was sampled, so the gradient stays unbiased
    even where another version of the policy decoded greedily.

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
    r"""Discounted return from each turn on, which all of its tokens share.

    .. math:: G_j = \sum_{k \ge j} \gamma^{k - j} r_k

    With one reward at the end this is :math:`\gamma^{J - j} R`: IPA, arXiv:2512.24873, where the unit of
    discounting is what happens between two calls of the environment, however many tokens it takes.

    Args:
        rewards: [J], sum of the rewards of each turn of the policy.
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
    r"""Return from each turn on against that of the group at the same turn.

    .. math:: A_{i,j} = G_{i,j} - \mathrm{mean}_{k \in g(i), J_k > j} G_{k,j}

    ``baseline="none"``: the return itself, as in arXiv:2512.24873. The mean is over the members that have a
    turn at that position; the turns of a member beyond all others' last are compared with nothing and get 0.

    Args:
        returns: of each trajectory, [J_i] each, see `turn_returns`; J_i may be 0.
        groups: group id of each trajectory, as many.

    Returns:
        Advantages, [J_i] each, new arrays.

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
    # each turn position of a group is a group of its own
    places = [f"{j} {group}" for row, group in zip(rows, groups, strict=True) for j in range(len(row))]
    centred = group_relative_advantage(np.concatenate([np.zeros(0), *rows]), places, scale="none")
    return np.split(centred, np.cumsum([len(row) for row in rows]))[: len(rows)]


def whiten(values: ArrayLike, mask: ArrayLike) -> Float64s:
    r"""Values with mean 0 and variance 1 over the mask, 0 outside it.

    Over all policy tokens of a batch, as PPO implementations do with advantages; the variance divides by the
    number of tokens. Nothing is added to the deviation; values that are equal but for rounding become 0.

    Args:
        values: [M]; outside the mask anything, NaN included.
        mask: [M], bool.

    Returns:
        Whitened values [M].

    Raises:
        ValueError: a value inside the mask is not finite, or the lengths differ.

    Example:
        >>> whiten([1.0, 3.0, 9.0], [True, True, False]).tolist()
        [-1.0, 1.0, 0.0]
    """
    inside = np.asarray(mask, dtype=np.bool_)
    everything = np.asarray(values, dtype=np.float64)
    if everything.shape != inside.shape:
        raise ValueError(f"mask of shape {inside.shape} for values of shape {everything.shape}")
    masked = _finite("masked value", everything[inside])
    whitened = np.zeros_like(everything)
    if not _uniform(masked):
        whitened[inside] = (masked - masked.mean()) / masked.std()
    return whitened


# --- of the batch ---------------------------------------------------------------------------------------------


def informative_scale(returns: ArrayLike, groups: Sequence[str]) -> float:
    r"""Factor that makes up for groups without signal: all groups / groups whose returns differ.

    RAPO of Fathom-DeepResearch, arXiv:2509.24107: with advantages times this a batch keeps the size of its
    gradient when many groups are all right or all wrong. The paper writes the numerator with the letter of the
    group size too; only the number of groups does what it is for. Without any informative group there is no
    advantage to scale, and the factor is 1. A group of one is not informative.

    Args:
        returns: [S].
        groups: group id of each trajectory, length S.

    Returns:
        At least 1.

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
    """As float64 [S], refused where one is not finite or there are not as many as there should be."""
    array = np.asarray(numbers, dtype=np.float64)
    if array.ndim != 1 or length not in (None, len(array)):
        raise ValueError(f"{what}s of shape {array.shape}, should be one for each of {length} trajectories")
    if not np.isfinite(array).all():
        raise ValueError(f"{what} {int((~np.isfinite(array)).argmax())} is not finite")
    return array


def _uniform(values: Float64s) -> bool:
    return not len(values) or bool(np.ptp(values) <= UNIFORM_SPREAD * max(1.0, float(np.abs(values).max())))


def _informative_groups(values: Float64s, groups: Sequence[str]) -> list[NDArray[np.intp]]:
    """Rows of each group whose members differ."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return [np.array(rows) for rows in members.values() if not _uniform(values[rows])]


def _scaled(values: Float64s, centre: float, scale: Scale) -> Float64s:
    centred: Float64s = values - centre
    if scale != "none":
        centred /= values.std(ddof=1 if scale == "sample_std" else 0) + STD_EPSILON
    return centred
