"""Test `learner.algorithms.replay` and the rescue of failed groups against slow twins and worked numbers."""

import math
import statistics
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from learner.algorithms.advantages import compare
from learner.algorithms.replay import (
    advantage_logits,
    advantage_recalibrated,
    choose,
    difficulty_logits,
    group_failed,
    last_success_logits,
    recent_logits,
    replay_quota_beside,
    selection_probabilities,
    self_imitation_weight,
    success_logits,
    uniform_logits,
)
from learner.replay.batch import can_rescue, remember, rescue, rescue_group
from learner.replay.table import make_table
from learner.settings.learner import ReplayConfig
from learner.trajectory import Unit
from tests.trajectories import make_group, make_trajectory

RNG = np.random.default_rng(11)


def softmax(logits):
    """Return softmax probabilities; shifting by the largest logit allows floats of any size."""
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


# --- selectors --------------------------------------------------------------------------------------------


def test_difficulty_takes_the_middle_of_five_at_a_sharp_temperature():
    """arXiv:2506.05316: p = (0, .25, .5, .75, 1), T = 1e-3; the next likeliest has e^-250, about 1e-109."""
    rates = [0.0, 0.25, 0.5, 0.75, 1.0]
    probabilities = selection_probabilities(difficulty_logits(rates, target=0.5, temperature=1e-3))
    assert probabilities[2] == 1.0
    assert 1e-110 < probabilities[1] < 1e-108
    assert probabilities[1] == probabilities[3]
    drawn = choose(difficulty_logits(rates, target=0.5, temperature=1e-3), 5, np.random.default_rng(0))
    assert drawn[0] == 2
    assert set(drawn[1:3]) == {1, 3}
    assert set(drawn[3:]) == {0, 4}


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1.0, 10.0])
def test_difficulty_against_its_twin(temperature):
    rates = RNG.random(7).tolist()
    expected = softmax([-abs(p - 0.3) / temperature for p in rates])
    got = selection_probabilities(difficulty_logits(rates, target=0.3, temperature=temperature))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-300)


def test_difficulty_is_uniform_in_the_limit_of_a_high_temperature():
    got = selection_probabilities(difficulty_logits([0.0, 0.2, 0.9], target=0.5, temperature=1e9))
    np.testing.assert_allclose(got, 1 / 3, rtol=1e-8)


def test_recent_weights_fall_linearly_to_nothing():
    """N = 2: weights 3, 2, 1 for lags 0, 1, 2."""
    lags = [0, 2, 1, 3, 0, 9]
    weights = [3, 1, 2, 0, 3, 0]
    expected = [w / sum(weights) for w in weights]
    np.testing.assert_allclose(selection_probabilities(recent_logits(lags, max_lag=2)), expected, rtol=1e-12)
    assert selection_probabilities(recent_logits([0, 1], max_lag=0)).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="does not exist yet"):
        recent_logits([1, -1], max_lag=2)


def test_success_rules_against_loops():
    returns = [0.0, 0.1, 0.11, 1.0, 0.5, 0.51]
    order = [5, 4, 3, 0, 2, 1]
    alike = [0.0 if r > 0.1 else -math.inf for r in returns]
    assert success_logits(returns, threshold=0.1).tolist() == alike
    newest = max((o, i) for i, (r, o) in enumerate(zip(returns, order, strict=True)) if r > 0.5)[1]
    last = last_success_logits(returns, order, threshold=0.5).tolist()
    assert last == [0.0 if i == newest else -math.inf for i in range(6)]
    assert last_success_logits([0.1, 0.2], [0, 1], threshold=0.5).tolist() == [-math.inf] * 2
    assert last_success_logits([], [], threshold=0.5).tolist() == []


def test_advantage_gate_needs_both_signs():
    """arXiv:2509.22601: an item is used iff it beat its group then and beats the median of groups now."""
    gate = advantage_logits([1.0, 1.0, -1.0, -1.0, 0.0, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    assert gate.tolist() == [0.0] + [-math.inf] * 5


def test_uniform_is_uniform():
    assert selection_probabilities(uniform_logits(5)).tolist() == [0.2] * 5
    assert selection_probabilities(uniform_logits(0)).tolist() == []


def test_choice_without_replacement_has_the_sequential_distribution():
    """P(i, then j) = p_i · p_j / (1 - p_i) for all pairs, within six standard deviations of 20000 draws."""
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    p = softmax(logits.tolist())
    rng, draws = np.random.default_rng(3), 20_000
    counts = dict.fromkeys(permutations(range(4), 2), 0)
    for _ in range(draws):
        counts[tuple(choose(logits, 2, rng))] += 1
    for (i, j), count in counts.items():
        expected = p[i] * p[j] / (1 - p[i])
        deviation = math.sqrt(expected * (1 - expected) / draws)
        assert abs(count / draws - expected) < 6 * deviation


def test_what_weighs_nothing_is_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, -700.0])
    for seed in range(50):
        assert sorted(choose(logits, 4, np.random.default_rng(seed))) == [1, 3]
    assert selection_probabilities([-np.inf, -np.inf]).tolist() == [0.0, 0.0]
    assert choose([-np.inf], 1, np.random.default_rng(0)) == []


# --- SPEAR, arXiv:2509.22601 ------------------------------------------------------------------------------


def test_imitation_warms_up():
    gamma = [self_imitation_weight(t, warmup_steps=200) for t in (0, 50, 100, 150, 200)]
    np.testing.assert_allclose(gamma, [0.0, 0.1464, 0.5, 0.8536, 1.0], atol=5e-5)
    assert self_imitation_weight(900, warmup_steps=200, ceiling=0.3) == 0.3
    assert self_imitation_weight(0, warmup_steps=0) == 1.0


def test_recalibrated_advantage_is_the_distance_to_the_median():
    assert advantage_recalibrated([0.0, 1.0], [0, 0, 1]).tolist() == [0.0, 1.0]
    baselines = RNG.random(10).tolist()
    returns = RNG.random(4).tolist()
    expected = [r - statistics.median(baselines) for r in returns]
    np.testing.assert_allclose(advantage_recalibrated(returns, baselines), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="no baselines"):
        advantage_recalibrated([1.0], [])


def test_items_at_or_below_the_median_are_gated_out():
    returns, baselines = [0.4, 0.5, 0.6], [0.2, 0.5, 0.9]
    recalibrated = advantage_recalibrated(returns, baselines)
    assert advantage_logits([1.0] * 3, recalibrated).tolist() == [-math.inf, -math.inf, 0.0]


# --- share ------------------------------------------------------------------------------------------------


def test_quota_beside_fresh_by_hand():
    """p = 0.4 beside 10 fresh items: 20/3 on average, as 6, 7, 7; the share of all is then 20 / 50."""
    carry, quotas = 0.0, []
    for _ in range(6):
        quota, carry = replay_quota_beside(0.4, 10, carry)
        quotas.append(quota)
    assert quotas == [6, 7, 7] * 2
    assert sum(quotas) / (sum(quotas) + 60) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="below 1"):
        replay_quota_beside(1.0, 10, 0.0)


# --- rescue, arXiv:2505.16282 and arXiv:2509.24107 --------------------------------------------------------


def test_which_groups_have_failed():
    assert group_failed([0.0] * 8)
    assert not group_failed([0.0] * 7 + [1.0])
    assert not group_failed([1.0] * 8), "all solved is no failure"
    assert group_failed([0.19, 0.19])
    assert not group_failed([0.2, 0.2]), "a mean of 0.2 is not below 0.2"
    assert group_failed([0.0, 0.09]), "standard deviation 0.045"
    assert not group_failed([0.0, 0.1]), "standard deviation 0.05 is not below 0.05"
    with pytest.raises(ValueError, match="without members"):
        group_failed([])


def test_a_failed_group_of_eight_gains_one_success():
    group = make_group("g7", [0.0] * 8, version=9)
    success = make_trajectory("won", group="g1", reward=1.0, version=4, logp=-0.5)
    # This advantage is from an earlier step; the group's own advantage counts now.
    success = replace(success, advantage=0.3)
    rescued = rescue(group, [success], np.random.default_rng(0))
    (place,) = [i for i, t in enumerate(rescued) if t.replayed]
    assert sorted(t.return_ for t in rescued) == [0.0] * 7 + [1.0]
    advantages = compare(np.array([t.return_ for t in rescued]), [t.group_id for t in rescued], scale="std")
    # Population standard deviation: 7 / sqrt 7 = 2.6458, -1 / sqrt 7 = -0.3780.
    expected = [2.6458 if i == place else -0.3780 for i in range(8)]
    np.testing.assert_allclose(advantages, expected, atol=6e-5)
    sample = np.array([t.return_ for t in rescued])
    sample = (sample - sample.mean()) / sample.std(ddof=1)
    np.testing.assert_allclose(sorted(sample), [-0.3536] * 7 + [2.4749], atol=5e-5)
    joined = rescued[place]
    assert joined.group_id == "g7"
    assert joined.group_size == group[0].group_size
    assert joined.trajectory_id == "won"
    assert joined.advantage is None
    np.testing.assert_array_equal(joined.logp_behaviour, success.logp_behaviour)
    np.testing.assert_array_equal(joined.policy_version, success.policy_version)
    assert not success.replayed, "what is stored is left as it was"
    others = [t for i, t in enumerate(group) if i != place]
    assert all(a is b for a, b in zip(others, [t for t in rescued if not t.replayed], strict=True))


def test_nothing_happens_without_a_stored_success_or_a_failure():
    failed, mixed = make_group("a", [0.0] * 4), make_group("b", [0.0, 0.0, 1.0, 0.0])
    success = make_trajectory("won", reward=1.0)
    rng = np.random.default_rng(0)
    assert all(a is b for a, b in zip(rescue(failed, [], rng), failed, strict=True))
    assert all(a is b for a, b in zip(rescue(mixed, [success], rng), mixed, strict=True))


def test_stored_success_and_place_are_uniform():
    """Two successes, four places: eight pairs of probability 1/8; 4000 draws, six standard deviations."""
    group = make_group("a", [0.0] * 4)
    stored = [make_trajectory(name, reward=1.0) for name in ("x", "y")]
    rng, counts = np.random.default_rng(5), {}
    for _ in range(4000):
        rescued = rescue(group, stored, rng)
        (pair,) = [(i, t.trajectory_id) for i, t in enumerate(rescued) if t.replayed]
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 8
    assert max(abs(n / 4000 - 1 / 8) for n in counts.values()) < 6 * math.sqrt(7 / 64 / 4000)


def test_only_a_failed_group_with_a_success_of_its_prompt_can_be_rescued():
    success, failed = make_trajectory("s", reward=1.0), [make_trajectory("s"), make_trajectory("s")]
    table = make_table(ReplayConfig(rule="success", max_policy_lag=9))
    assert not can_rescue(table, failed)
    remember(table, [Unit("u", "g", [success, *failed])], step=0)
    assert can_rescue(table, failed)
    assert not can_rescue(table, [success, *failed[1:]])
    assert not can_rescue(table, [make_trajectory("another prompt")] * 2)
    assert not can_rescue(make_table(ReplayConfig(rule="uniform", max_policy_lag=9)), failed)


@pytest.mark.parametrize("rule", ["success", "per_prompt"])
def test_partial_credit_makes_no_success_where_the_environment_says_what_is_right(rule):
    """With a threshold of the return, 83 % of what a run stored was wrong."""
    table = make_table(ReplayConfig(rule=rule, max_policy_lag=9))
    wrong = [make_trajectory(f"w{n}", reward=0.6, correct=False) for n in range(2)]
    remember(table, [Unit("u", "g", wrong)], step=0)
    assert len(table) == 0
    right = replace(wrong[0], trajectory_id="r", correct=True)
    remember(table, [Unit("v", "g", [right])], step=0)
    assert [entry.item for entry in table.entries.values()] == [right]


def test_a_group_in_which_nobody_is_right_has_failed_whatever_partial_credit_it_got():
    table = make_table(ReplayConfig(rule="success", max_policy_lag=9))
    wrong = [make_trajectory("s", reward=reward, correct=False) for reward in (0.9, 0.1)]
    remember(table, [Unit("u", "g", [replace(wrong[0], correct=True)])], step=0)
    members = rescue_group(table, wrong, step=1, version=1, rng=np.random.default_rng(0))
    assert [t.replayed for t in members].count(True) == 1
    by_return = make_table(ReplayConfig(rule="success", max_policy_lag=9, outcome="return"))
    remember(by_return, [Unit("u", "g", [wrong[0]])], step=0)
    assert rescue_group(by_return, wrong, step=1, version=1, rng=np.random.default_rng(0)) == wrong
