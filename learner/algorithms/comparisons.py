"""Comparisons: by how much a value is better than the values that it is compared with.

All functions compute in numpy and float64. Values with equal keys are compared with each other; their order does
not matter. Only the values that are there count: means and deviations are taken over them, and not over a planned
number. A value without a second one of its key is 0 afterwards, because there is nothing to compare it with. Values
that are equal up to rounding are exactly 0 afterwards.
"""

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
