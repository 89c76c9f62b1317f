"""Test the values that change from step to step, and how an update gets them."""

from dataclasses import replace

import numpy as np
import pytest

from learner.algorithm_config import AlgorithmConfig, CriticConfig, GaeAdvantage, Reincarnation
from learner.surrogate_config import RatioVarianceSurrogate, WindowSurrogate
from learner.update.adaptive import first_state, state_at, total_optimizer_steps
from learner.update.credit_assignment import Estimates, assign_credit
from tests.trajectories import make_group, make_trajectory


@pytest.mark.parametrize(("before", "after", "expected"), [(2, 1, 2 * 50 + 550), (1, 2, 50 + 2 * 550)])
def test_a_reincarnated_run_has_as_many_optimizer_steps_as_it_takes(before, after, expected):
    change = Reincarnation(step=50, updates_per_batch=after)
    config = AlgorithmConfig(updates_per_batch=before, reincarnation=change)
    assert total_optimizer_steps(config, 600) == expected
    assert total_optimizer_steps(config, 20) == 20 * before


def test_a_dual_variable_starts_with_its_surrogate():
    change = Reincarnation(step=5, surrogate=RatioVarianceSurrogate(dual_start=3.0), corrections=())
    config = AlgorithmConfig(surrogate=WindowSurrogate(), corrections=(), reincarnation=change)
    state = first_state(config)
    assert state.dual == 0
    assert state_at(config, state, 4) == state
    assert state_at(config, state, 5).dual == 3.0


def test_advantages_are_whitened_over_what_will_be_trained():
    """All fresh responses earned 1 and all stale ones 0, so no fresh response is better than the others."""
    rows = [make_trajectory(f"t{i}", group=f"g{i}", reward=float(i < 2)) for i in range(4)]
    config = AlgorithmConfig(advantage=GaeAdvantage(trace=1.0), critic=CriticConfig())
    total = sum(map(len, rows))
    estimates = Estimates(np.zeros(total), np.ones(total))
    fresh = np.repeat([True, True, False, False], [len(t) for t in rows])
    fresh &= np.concatenate([t.action_mask for t in rows])
    advantage = assign_credit(config, rows, estimates, fresh).advantage
    assert np.abs(advantage[fresh]).max() == pytest.approx(0, abs=1e-9)
    assert assign_credit(config, rows, estimates).advantage[fresh].min() > 0.9


def test_replayed_singles_do_not_dilute_the_scale_of_groups():
    group = make_group("g", [1.0, 0.0])
    single = replace(make_trajectory("s", group="s", reward=1.0), advantage=0.25, replayed=True)
    config = AlgorithmConfig(scale_by_informative=True)
    alone = assign_credit(config, group).advantage
    joined = assign_credit(config, [*group, single])
    assert np.array_equal(joined.advantage[: len(alone)], alone)
    assert set(joined.advantage[len(alone) :]) == set(joined.median_advantage[len(alone) :]) == {0.25}
