"""Which tokens are fresh enough to carry gradient."""

import numpy as np
from numpy.typing import NDArray

from learner.errors import StaleTokens


def loss_mask(
    action_mask: NDArray[np.bool_],
    policy_version: NDArray[np.integer],
    *,
    current_version: int,
    max_policy_lag: int,
) -> NDArray[np.bool_]:
    """Action tokens whose policy lag is within the bound.

    A trajectory that several versions wrote keeps its fresh suffix.

    Args:
        action_mask: [T], True on tokens the policy sampled.
        policy_version: [T], version that sampled each token; ignored on observations.
        current_version: version of the policy about to be updated.
        max_policy_lag: largest lag, in versions, >= 0.

    Returns:
        Bool [T].

    Example:
        >>> mask, versions = np.array([False, True, True, True]), np.array([-1, 3, 4, 5])
        >>> loss_mask(mask, versions, current_version=5, max_policy_lag=1).tolist()
        [False, False, True, True]
    """
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
    """Check the bound on the tokens that carry gradient, right before they do.

    Args:
        mask: [T], tokens that carry gradient.
        policy_version: [T].

    Raises:
        StaleTokens: naming the oldest such token, or one from a version that does not exist yet.

    Example:
        >>> assert_lag_bound(np.array([True]), np.array([3]), current_version=5, max_policy_lag=2)
        >>> assert_lag_bound(np.array([True]), np.array([2]), current_version=5, max_policy_lag=2)
        Traceback (most recent call last):
        learner.errors.StaleTokens: trajectory ?: token 0 of version 2 lags 3 behind 5, bound 2
    """
    lags = np.where(mask, current_version - policy_version, 0)
    if not lags.size:
        return
    oldest = int(lags.argmax())
    if lags[oldest] > max_policy_lag:
        raise StaleTokens(
            f"trajectory {trajectory_id}: token {oldest} of version {policy_version[oldest]} lags "
            f"{lags[oldest]} behind {current_version}, bound {max_policy_lag}"
        )
    if (newest := int(lags.argmin())) >= 0 and lags[newest] < 0:
        raise StaleTokens(
            f"trajectory {trajectory_id}: token {newest} is of version {policy_version[newest]}, "
            f"the learner is at {current_version}; the generator serves weights of another run or epoch"
        )
