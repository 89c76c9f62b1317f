"""Test the values that change from step to step, and how an update gets them."""

from dataclasses import replace

import numpy as np
import pytest

from learner.advantages import Estimates, TokenAdvantages, assign_advantages
from learner.algorithms.advantages import extended_gae
from learner.settings.advantages import GaeAdvantage, TurnReturnAdvantage
from learner.settings.algorithm import AlgorithmConfig, CriticConfig, Reincarnation
from learner.settings.surrogates import RatioVarianceSurrogate, WindowSurrogate
from learner.update.adaptive import algorithm_at, first_state, state_at, total_optimizer_steps
from learner.update.batch import make_batch
from protocol.messages.episodes import Reward, Turn
from tests.trajectories import make_group, make_trajectory


@pytest.mark.parametrize("field", ["updates_per_batch", "passes"])
@pytest.mark.parametrize(("before", "after", "expected"), [(2, 1, 2 * 50 + 550), (1, 2, 50 + 2 * 550)])
def test_a_reincarnated_run_has_as_many_optimizer_steps_as_it_takes(field, before, after, expected):
    change = Reincarnation(step=50, **{field: after})
    config = AlgorithmConfig(**{field: before}, reincarnation=change)
    assert (getattr(algorithm_at(config, 49), field), getattr(algorithm_at(config, 50), field)) == (
        before,
        after,
    )
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
    advantage = assign_advantages(config, rows, estimates, fresh).advantage
    assert np.abs(advantage[fresh]).max() == pytest.approx(0, abs=1e-9)
    assert assign_advantages(config, rows, estimates).advantage[fresh].min() > 0.9


def test_replayed_singles_do_not_dilute_the_scale_of_groups():
    group = make_group("g", [1.0, 0.0])
    single = replace(make_trajectory("s", group="s", reward=1.0), advantage=0.25, origin="replayed")
    config = AlgorithmConfig(scale_by_informative=True)
    alone = assign_advantages(config, group).advantage
    joined = assign_advantages(config, [*group, single])
    assert np.array_equal(joined.advantage[: len(alone)], alone)
    assert set(joined.advantage[len(alone) :]) == set(joined.median_advantage[len(alone) :]) == {0.25}


@pytest.mark.parametrize(
    ("turn", "expected"), [(0, [2, 0]), (1, [2, 0]), (2, [2, 0]), (3, [2, 2]), (4, [2, 2])]
)
def test_a_reward_between_two_actions_is_credited_to_the_action_before_it(turn, expected):
    """Tokens 0 and 1 are the prompt, 2 and 3 the first action, 4 an observation, 5 and 6 the second action."""
    turns = [Turn(0, 0, 2, False), Turn(1, 2, 4, True), Turn(2, 4, 5, False), Turn(3, 5, 7, True)]
    row = make_trajectory("t", prompt=2, actions=5, observation=(4, 5))
    row = replace(row, turns=turns, rewards=[Reward("tool", turn, 2.0)])
    config = AlgorithmConfig(advantage=TurnReturnAdvantage(baseline="none"))
    advantage = assign_advantages(config, [row]).advantage
    assert [advantage[2], advantage[5]] == expected


def test_a_trajectory_that_never_acted_has_no_turn_to_credit():
    row = replace(make_trajectory("t", prompt=5, actions=0, reward=1.0), turns=[Turn(0, 0, 5, False)])
    config = AlgorithmConfig(advantage=TurnReturnAdvantage(baseline="none"))
    assert not assign_advantages(config, [row]).advantage.any()


def test_lambda_expects_half_of_the_largest_window_not_of_the_present_one():
    """arXiv:2506.15050: an unfinished response of 2 tokens so far, in windows of at most 16, has length 10."""
    row = replace(make_trajectory("t", prompt=2, actions=2), status="unfinished")
    gae = GaeAdvantage(trace=0.0, adaptive_alpha=0.2, whiten=False, ignored_tail=0)
    config = AlgorithmConfig(advantage=gae, critic=CriticConfig())
    estimates = Estimates(np.array([0.0, 0.0, 1.0, 3.0]), np.ones(4))
    found = assign_advantages(config, [row], estimates, window_tokens=16).advantage[2:]
    expected = extended_gae([0, 0], [1.0, 3.0], finished=False, discount=1.0, trace=1 - 1 / (0.2 * 10))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("status", "correct", "reward", "good"),
    [
        ("finished", True, 0.2, True),
        # A wrong answer has partial credit.
        ("finished", False, 0.9, False),
        ("unfinished", True, 1.0, False),
        # The environment does not tell.
        ("finished", None, 0.9, False),
        ("truncated", None, 1.0, True),
    ],
)
def test_solved_tasks_are_imitated(status, correct, reward, good):
    row = replace(make_trajectory("t", actions=5, reward=reward), status=status, correct=correct)
    credit = TokenAdvantages.of_tokens(np.zeros(len(row)), np.zeros(len(row)))
    batch = make_batch([row], credit, current_version=0, max_policy_lag=0, imitate_from=1.0)
    assert batch.columns["imitation_mask"].sum() == 5 * good
    none = make_batch([row], credit, current_version=0, max_policy_lag=0)
    assert not none.columns["imitation_mask"].any()
