"""Test each function of `learner.algorithms.advantages` against a slow twin and hand-worked numbers."""

import math
import statistics

import numpy as np
import pytest

from learner.algorithms.advantages import (
    compare,
    greedy_baseline_advantage,
    informative_scale,
    median_relative_advantage,
    spread,
    token_group_advantage,
    turn_returns,
    whiten,
)

RNG = np.random.default_rng(23)
GROUPS = ["a", "b", "a", "a", "c", "b", "a", "d", "d", "d"]
"""Groups of four, two, one and three members, mixed, as losses leave groups of four."""


def others(i, groups):
    return [j for j in range(len(groups)) if groups[j] == groups[i] and j != i]


def peers(i, groups):
    return [*others(i, groups), i]


def sampled_returns():
    return RNG.normal(size=len(GROUPS))


@pytest.mark.parametrize("scale", ["std", "sample_std", "none"])
def test_group_relative_against_a_loop(scale):
    returns = sampled_returns()
    deviation = {"std": statistics.pstdev, "sample_std": statistics.stdev, "none": None}[scale]
    expected = []
    for i in range(len(GROUPS)):
        mine = [returns[j] for j in peers(i, GROUPS)]
        centred = returns[i] - sum(mine) / len(mine)
        alone = len(mine) == 1
        expected.append(0.0 if alone else centred / (deviation(mine) + 1e-6 if deviation else 1.0))
    np.testing.assert_allclose(compare(returns, GROUPS, scale=scale), expected, atol=1e-12)


def test_sample_deviation_by_hand():
    """Returns 0, 0, 0, 1: mean 1/4, sum of squares 3/4; divided by G - 1 = 3, the deviation is 1/2."""
    advantages = compare([0, 0, 0, 1], ["a"] * 4, scale="sample_std")
    np.testing.assert_allclose(advantages, [-0.5, -0.5, -0.5, 1.5], atol=4e-6)


def test_leave_one_out_against_a_loop():
    returns = sampled_returns()
    expected = []
    for i in range(len(GROUPS)):
        rest = [returns[j] for j in others(i, GROUPS)]
        expected.append(returns[i] - sum(rest) / len(rest) if rest else 0.0)
    np.testing.assert_allclose(compare(returns, GROUPS, scale="leave_one_out"), expected, atol=1e-12)


def test_leave_one_out_by_hand():
    """1 - (0 + .5 + .5)/3 = 2/3; K/(K-1) times the distance from the mean is equal to it: 4/3 * .5."""
    returns = np.array([1.0, 0.0, 0.5, 0.5])
    advantages = compare(returns, ["a"] * 4, scale="leave_one_out")
    np.testing.assert_allclose(advantages, [2 / 3, -2 / 3, 0, 0], atol=1e-15)
    np.testing.assert_allclose(advantages, 4 / 3 * (returns - 0.5), atol=1e-15)


def test_a_member_that_was_lost_is_not_divided_by():
    """Two of a group of four are left: each is compared only with the other."""
    assert compare([1.0, 0.25], ["a", "a"], scale="leave_one_out").tolist() == [0.75, -0.75]


def test_median_against_a_loop():
    returns = sampled_returns()
    expected = []
    for i in range(len(GROUPS)):
        mine = sorted(returns[j] for j in peers(i, GROUPS))
        n = len(mine)
        middle = (mine[(n - 1) // 2] + mine[n // 2]) / 2
        expected.append((returns[i] - middle) / (statistics.stdev(mine) + 1e-6) if n > 1 else 0.0)
    np.testing.assert_allclose(median_relative_advantage(returns, GROUPS), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("returns", "temperature", "targets"),
    [
        ([0, 0, 0, 1], 1e-4, [1.0, 1.0, 1.0, 1.3]),
        ([0, 0, 1, 1], 1e-4, [0.7, 0.7, 1.3, 1.3]),
        ([0, 0, 0, 1], 1.0, [1.0, 1.0, 1.0, 1.228478]),
    ],
)
def test_median_gives_the_target_ratios_of_bounded_ratio_learning(returns, temperature, targets):
    """arXiv:2604.18578: target 1 - c + 2 c sigmoid(z / T), c = 0.3; members at the median are drawn to 1."""
    z = median_relative_advantage(returns, ["a"] * 4)
    drawn = [0.7 + 0.6 / (1 + math.exp(-v / temperature)) if v > -0.05 else 0.7 for v in z]
    np.testing.assert_allclose(drawn, targets, atol=1e-6)


def test_a_group_of_one_has_no_advantage():
    for advantage in (
        compare([3.0], ["a"], scale="sample_std"),
        compare([3.0], ["a"], scale="leave_one_out"),
        median_relative_advantage([3.0], ["a"]),
        token_group_advantage([3.0], [7], ["a"]),
        compare([3.0], ["a"], scale="mean_abs"),
        compare([3.0], ["a"], scale="rank_normal"),
    ):
        assert advantage.tolist() == [0.0]


@pytest.mark.parametrize("scale", [1.0, 1e9])
@pytest.mark.parametrize("other", [0.3, 0.1 + 0.2])
def test_returns_equal_but_for_rounding_give_exactly_zero(other, scale):
    """0.1 + 0.2 exceeds 0.3 by 5.6e-17; an equally small deviation must not amplify it, at any scale."""
    returns, groups = [0.3 * scale, other * scale, 0.3 * scale], ["a"] * 3
    for advantage in (
        compare(returns, groups, scale="sample_std"),
        compare(returns, groups, scale="leave_one_out"),
        median_relative_advantage(returns, groups),
        token_group_advantage(returns, [1, 2, 3], groups),
        compare(returns, groups, scale="mean_abs"),
        compare(returns, groups, scale="rank_normal"),
        whiten(returns, [True] * 3),
    ):
        assert (advantage == 0).all()
    assert informative_scale([*returns, 1.0, 0.0], [*groups, "b", "b"]) == 2.0


def test_a_small_difference_that_is_no_rounding_counts():
    returns = [0.3, 0.3 + 1e-6, 0.3]
    assert whiten(returns, [True] * 3) == pytest.approx([-1 / 300, 2 / 300, -1 / 300], rel=1e-4)
    assert informative_scale(returns, ["a"] * 3) == 1.0
    assert compare(returns, ["a"] * 3, scale="leave_one_out")[1] == pytest.approx(1e-6)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_batch_mean_against_a_loop(scale):
    returns = sampled_returns()
    mean = sum(returns) / len(returns)
    divisor = statistics.pstdev(returns) + 1e-6 if scale == "std" else 1.0
    expected = [(r - mean) / divisor for r in returns]
    np.testing.assert_allclose(compare(returns, [""] * len(returns), scale=scale), expected, atol=1e-12)


def test_greedy_baseline():
    """arXiv:2310.10505: a return equal to the greedy one gives 0; a shift of all rewards changes nothing."""
    returns, baselines = np.array([1.0, 0.0, 0.5]), np.array([0.5, 0.5, 0.5])
    assert greedy_baseline_advantage(returns, baselines).tolist() == [0.5, -0.5, 0.0]
    assert greedy_baseline_advantage(returns + 2, baselines + 2).tolist() == [0.5, -0.5, 0.0]


def test_a_missing_greedy_response_is_named():
    with pytest.raises(ValueError, match="trajectory 1 has no baseline"):
        greedy_baseline_advantage([1.0, 0.0], [0.5, math.nan])


def test_token_group_by_hand():
    """Lengths 2 and 6, returns 1 and 0: mean 1/4, variance 3/16 over eight tokens; sum over tokens 0."""
    advantages = token_group_advantage([1.0, 0.0], [2, 6], ["a", "a"])
    np.testing.assert_allclose(advantages, [math.sqrt(3), -1 / math.sqrt(3)], atol=5e-6)
    assert 2 * advantages[0] + 6 * advantages[1] == pytest.approx(0, abs=1e-12)


def test_token_group_against_every_token_written_out():
    returns, lengths = sampled_returns(), RNG.integers(1, 9, len(GROUPS))
    expected = []
    for i in range(len(GROUPS)):
        tokens = [returns[j] for j in peers(i, GROUPS) for _ in range(lengths[j])]
        mean = sum(tokens) / len(tokens)
        alone = len(peers(i, GROUPS)) == 1
        expected.append(0.0 if alone else (returns[i] - mean) / (statistics.pstdev(tokens) + 1e-6))
    assert max(map(abs, expected)) < 5
    np.testing.assert_allclose(token_group_advantage(returns, lengths, GROUPS), expected, atol=1e-12)


def test_a_group_with_a_giant_falls_back_alone():
    """One token against 99 would give sqrt(99), so group "a" falls back; group "b" stays at token level."""
    returns, lengths, groups = [1.0, 0.0, 1.0, 0.0], [1, 99, 2, 6], ["a", "a", "b", "b"]
    advantages = token_group_advantage(returns, lengths, groups)
    np.testing.assert_allclose(advantages, [1, -1, math.sqrt(3), -1 / math.sqrt(3)], atol=5e-6)
    higher = token_group_advantage(returns, lengths, groups, ceiling=10.0)
    np.testing.assert_allclose(higher[:2], [math.sqrt(99), -1 / math.sqrt(99)], atol=2e-4)


def test_the_fall_back_begins_at_the_ceiling_itself():
    returns, lengths, groups = [1.0, 0.0], [2, 6], ["a", "a"]
    largest = token_group_advantage(returns, lengths, groups).max()
    at = token_group_advantage(returns, lengths, groups, ceiling=largest)
    np.testing.assert_allclose(at, [1, -1], atol=5e-6)
    above = token_group_advantage(returns, lengths, groups, ceiling=np.nextafter(largest, 9))
    assert above.max() == largest


def test_a_trajectory_without_tokens_is_not_compared_with():
    with_it = token_group_advantage([1.0, 0.0, 9.0], [2, 6, 0], ["a"] * 3)
    assert with_it.tolist() == [*token_group_advantage([1.0, 0.0], [2, 6], ["a"] * 2), 0.0]


def test_equal_lengths_reduce_to_grpo():
    returns = sampled_returns()
    plain = compare(returns, GROUPS, scale="std")
    np.testing.assert_allclose(token_group_advantage(returns, [4] * len(GROUPS), GROUPS), plain, atol=1e-12)


@pytest.mark.parametrize(("discount", "expected"), [(0.9, [0.81, 0.9, 1.0]), (1.0, [1.0, 1.0, 1.0])])
def test_turn_returns_of_a_final_reward(discount, expected):
    """arXiv:2512.24873: turn j of J gets gamma^(J - j) times the reward at the end."""
    np.testing.assert_allclose(turn_returns([0, 0, 1], discount=discount), expected, atol=1e-15)


def test_turn_returns_against_the_sum():
    rewards = RNG.normal(size=7)
    expected = [sum(0.8 ** (k - j) * rewards[k] for k in range(j, 7)) for j in range(7)]
    np.testing.assert_allclose(turn_returns(rewards, discount=0.8), expected, atol=1e-12)


def test_no_trajectories_at_all():
    assert compare([], [], scale="leave_one_out").shape == (0,)
    assert informative_scale([], []) == 1.0
    assert whiten([], []).shape == (0,)


def test_whitened_by_hand():
    """1, 3, 5 have mean 3 and variance 8/3. A NaN outside the mask has no effect."""
    result = whiten([1, math.nan, 3, 5], [True, False, True, True])
    np.testing.assert_allclose(result, [-math.sqrt(1.5), 0, 0, math.sqrt(1.5)], atol=1e-8)


@pytest.mark.parametrize("spread", [1e-8, 1e-6, 1e-4, 1.0])
def test_whitening_has_a_floor(spread):
    """verl (`masked_whiten`) and TRL compute (v - mean) / sqrt(var + 1e-8), so that rounding stays small."""
    values = spread * np.array([1.0, -1.0, 3.0, 0.5])
    expected = (values - values.mean()) / math.sqrt(np.mean((values - values.mean()) ** 2) + 1e-8)
    np.testing.assert_allclose(whiten(values, [True] * 4), expected, rtol=1e-12)
    assert np.abs(whiten(values, [True] * 4)).max() <= 3e4 * spread


def test_informative_scale_by_hand():
    """arXiv:2509.24107: if 8 of 32 groups have both outcomes, the factor is 4; if none has, it is 1."""
    returns, groups = [], []
    for g in range(32):
        returns += [1.0, 0.0] if g < 8 else [float(g % 2)] * 2
        groups += [f"g{g}"] * 2
    assert informative_scale(returns, groups) == 4.0
    assert informative_scale(returns[16:], groups[16:]) == 1.0


def test_a_lone_member_is_not_an_informative_group():
    assert informative_scale([1.0, 0.0, 1.0], ["a", "a", "b"]) == 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare([1.0, math.inf], ["a", "a"], scale="std"), "value 1 is not finite"),
        (lambda: median_relative_advantage([1.0], ["a", "a"]), "each of 2"),
        (lambda: token_group_advantage([1.0], [-1], ["a"]), "shortest length -1"),
        (lambda: token_group_advantage([1.0], [1], ["a"], ceiling=0), "ceiling 0"),
        (lambda: compare([0.0], [], scale="none"), "each of 0"),
        (lambda: spread([0.0, 1.0], ["a", "a"], scale="rank_normal"), "divides by no deviation"),
        (lambda: turn_returns([math.nan], discount=1.0), "reward 0"),
        (lambda: whiten([1.0, 2.0], [True]), "mask of shape"),
        (lambda: whiten([math.nan], [True]), "masked value 0"),
        (lambda: greedy_baseline_advantage([1.0], [1.0, 2.0]), "each of 1"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
