"""Functions that every objective needs for its tokens: shapes, levels of ratios, the lag bound, and weights of losses.

This file imports no torch, because functions of numpy arrays and the run file use it, too.
"""

from collections.abc import Mapping
from typing import Literal, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from learner.errors import StaleTokens

Level = Literal["token", "turn", "sequence"]
"""One ratio per token, per turn of the policy, or per trajectory."""


class _Shaped(Protocol):
    """A tensor or an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_same_shape(**tensors: _Shaped | float | None) -> None:
    """Raise unless all tensors have one shape.

    Numbers, and tensors without dimensions, fit every shape, because they broadcast as numbers. None stands
    for a tensor that was not given, and is not compared. Shapes are host data, so the check never waits for a
    GPU.

    Args:
        tensors: torch tensors or numpy arrays, by the name that the error shows.

    Raises:
        ValueError: two of the tensors differ in shape.

    Example:
        >>> import numpy as np
        >>> check_same_shape(ratio=np.ones(3), advantage=np.zeros(3), low=0.2, before=None)
        >>> check_same_shape(ratio=np.ones(3), advantage=np.zeros((3, 1)))
        Traceback (most recent call last):
        ValueError: tensors must have one shape, got ratio (3,), advantage (3, 1)
    """
    first = None
    for tensor in tensors.values():
        if shape := getattr(tensor, "shape", None):
            if first is None:
                first = shape
            elif shape != first:
                raise ValueError(f"tensors must have one shape, got {_listed(tensors)}")


def _listed(tensors: Mapping[str, _Shaped | float | None]) -> str:
    shapes = ((name, getattr(tensor, "shape", ())) for name, tensor in tensors.items())
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes if shape)


def loss_mask(
    action_mask: NDArray[np.bool_],
    policy_version: NDArray[np.integer],
    *,
    current_version: int,
    max_policy_lag: int,
) -> NDArray[np.bool_]:
    """Select the action tokens whose policy lag is within the bound.

    A trajectory that several policy versions sampled keeps its fresh suffix.

    Args:
        action_mask: [T], True on tokens that the policy sampled.
        policy_version: [T], version that sampled each token; ignored on observation tokens.
        current_version: version of the policy about to be updated.
        max_policy_lag: largest lag, in versions, >= 0.

    Returns:
        Mask, bool [T].

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> mask, versions = np.array([False, True, True, True]), np.array([-1, 3, 4, 5])
        >>> loss_mask(mask, versions, current_version=5, max_policy_lag=1).tolist()
        [False, False, True, True]
    """
    check_same_shape(action_mask=action_mask, policy_version=policy_version)
    fresh: NDArray[np.bool_] = current_version - policy_version <= max_policy_lag
    return action_mask & fresh


def assert_lag_bound(
    mask: NDArray[np.bool_],
    policy_version: NDArray[np.integer],
    *,
    current_version: int,
    max_policy_lag: int,
    trajectory_id: str = "?",
) -> None:
    """Check the lag bound on the tokens that carry gradient, right before the gradient is computed.

    Args:
        mask: [T], tokens that carry gradient.
        policy_version: [T], version that sampled each token.
        current_version: version of the policy about to be updated.
        max_policy_lag: largest lag, in versions, >= 0.
        trajectory_id: name of the trajectory in the error message.

    Raises:
        StaleTokens: a token lags more than the bound (the message names the oldest), or is from a version
            that does not exist yet.
        ValueError: the shapes differ.

    Example:
        >>> assert_lag_bound(np.array([True]), np.array([3]), current_version=5, max_policy_lag=2)
        >>> assert_lag_bound(np.array([True]), np.array([2]), current_version=5, max_policy_lag=2)
        Traceback (most recent call last):
        learner.errors.StaleTokens: trajectory ?: token 0 of version 2 lags 3 behind 5, bound 2
    """
    check_same_shape(mask=mask, policy_version=policy_version)
    lags = np.where(mask, current_version - policy_version, 0)
    if not lags.size:
        return
    oldest = int(lags.argmax())
    if lags[oldest] > max_policy_lag:
        raise StaleTokens(
            f"trajectory {trajectory_id}: token {oldest} of version {policy_version[oldest]} lags "
            f"{lags[oldest]} behind {current_version}, bound {max_policy_lag}"
        )
    newest = int(lags.argmin())
    if lags[newest] < 0:
        raise StaleTokens(
            f"trajectory {trajectory_id}: token {newest} is of version {policy_version[newest]}, "
            f"the learner is at {current_version}; the generator serves weights of another run or epoch"
        )


Aggregation = Literal["token_mean", "sequence_mean", "fixed"]


def token_weights(
    tokens: NDArray[np.integer], *, aggregation: Aggregation, fixed_tokens: int = 0
) -> NDArray[np.float64]:
    r"""Compute the weight of one token of each trajectory.

    ``token_mean``: :math:`1 / \sum_j n_j`, every token counts the same (DAPO, arXiv:2503.14476, equation 12).
    ``sequence_mean``: :math:`1 / (S n_i)`, every trajectory counts the same (GRPO, arXiv:2402.03300, equation
    3). ``fixed``: :math:`1 / (S L)`, the tokens of every trajectory are summed and divided by one constant L.
    A token then counts the same in long and short trajectories, and in all mini-batches of S trajectories
    (Dr. GRPO, arXiv:2503.20783, whose program sets L to the largest allowed response length). S in these
    formulas counts only the trajectories with at least one token.

    Args:
        tokens: number n_i of tokens that carry gradient in each trajectory, one entry per trajectory.
        aggregation: which of the three weightings.
        fixed_tokens: L >= 1 for ``fixed``; ignored by the others.

    Returns:
        Weights, one per trajectory; 0 for trajectories without tokens.

    Raises:
        ValueError: ``fixed`` without ``fixed_tokens``.

    Example:
        >>> token_weights(np.array([3, 1]), aggregation="token_mean").tolist()
        [0.25, 0.25]
        >>> token_weights(np.array([4, 1, 0]), aggregation="sequence_mean").tolist()
        [0.125, 0.5, 0.0]
        >>> token_weights(np.array([4, 1, 0]), aggregation="fixed", fixed_tokens=8).tolist()
        [0.0625, 0.0625, 0.0]
    """
    present = tokens > 0
    weights = np.zeros(len(tokens))
    match aggregation:
        case "token_mean":
            weights[present] = 1 / max(1, int(tokens.sum()))
        case "sequence_mean":
            weights[present] = 1 / (present.sum() * tokens[present])
        case "fixed":
            if fixed_tokens < 1:
                raise ValueError(f'aggregation "fixed" needs fixed_tokens >= 1, got {fixed_tokens}')
            weights[present] = 1 / (max(1, int(present.sum())) * fixed_tokens)
        case _:
            assert_never(aggregation)
    return weights
