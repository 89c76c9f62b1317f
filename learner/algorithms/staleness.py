"""Selection of the tokens that are fresh enough to carry gradient."""

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.shapes import check_same_shape
from learner.errors import StaleTokens


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
