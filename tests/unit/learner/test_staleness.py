"""The bound on the lag is asserted where the gradient is made, not only where data arrives."""

import numpy as np
import pytest

import learner.update.batch
from learner.algorithms.tokens import assert_lag_bound, loss_mask
from learner.errors import StaleTokens
from tests.trajectories import batch_of, make_trajectory

MASK = np.array([False, True, True, True])
VERSIONS = np.array([-1, 2, 5, 6])


@pytest.mark.parametrize(("lag", "expected"), [(0, [0, 0, 0, 1]), (1, [0, 0, 1, 1]), (4, [0, 1, 1, 1])])
def test_mask(lag, expected):
    mask = loss_mask(MASK, VERSIONS, current_version=6, max_policy_lag=lag)
    assert mask.astype(int).tolist() == expected


def test_assertion_names_the_oldest_token():
    with pytest.raises(StaleTokens, match="trajectory t: token 1 of version 2 lags 4 behind 6, bound 3"):
        assert_lag_bound(MASK, VERSIONS, current_version=6, max_policy_lag=3, trajectory_id="t")
    assert_lag_bound(MASK, VERSIONS, current_version=6, max_policy_lag=4)


def test_a_broken_mask_is_caught_before_the_gradient(monkeypatch):
    """A mask that passes everything stands for a bug of ours; the assertion behind the mask must fire."""
    monkeypatch.setattr(learner.update.batch, "loss_mask", lambda action_mask, version, **_: action_mask)
    with pytest.raises(StaleTokens, match="lags 9 behind 9, bound 2"):
        batch_of([make_trajectory("t", version=0)], current_version=9, max_policy_lag=2)
