"""Advantages: how much better a trajectory did than was to be expected."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6
UNIFORM_SPREAD = 1e-9


def group_relative_advantage(
    returns: NDArray[np.floating], groups: Sequence[str], *, scale: Literal["std", "none"]
) -> NDArray[np.float64]:
    r"""Return of each trajectory against the mean of its rollout group.

    .. math:: A_i = \frac{R_i - \mathrm{mean}_{j \in g(i)} R_j}{\mathrm{std}_{j \in g(i)} R_j + 10^{-6}}

    GRPO, arXiv:2402.03300, section 4.1.2 (``scale="std"``, here the standard deviation of the group itself,
    divided by G, not G - 1); without the division it is the Dr. GRPO form, arXiv:2503.20783, section 3.2
    (``scale="none"``). A group that lost members is judged by those that are here.

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
    values = np.asarray(returns, dtype=np.float64)
    if values.shape != (len(groups),):
        raise ValueError(f"{len(groups)} group ids for returns of shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"return {int((~np.isfinite(values)).argmax())} is not finite")
    advantages = np.zeros_like(values)
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    for rows in members.values():
        group_returns = values[rows]
        if np.ptp(group_returns) <= UNIFORM_SPREAD * max(1.0, float(np.abs(group_returns).max())):
            continue
        centred = group_returns - group_returns.mean()
        advantages[rows] = centred / (group_returns.std() + STD_EPSILON) if scale == "std" else centred
    return advantages
