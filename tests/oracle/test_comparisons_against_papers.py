"""Test sums of comparisons against slow twins, hand-worked numbers, and the numbers of the code before them."""

import math
import statistics
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from learner.advantages import assign_advantages
from learner.algorithms.advantages import compare, has_peers, spread
from learner.comparisons import compared_advantages, has_signal
from learner.settings.advantages import ComparedAdvantage
from learner.settings.algorithm import AlgorithmConfig
from tests.trajectories import make_turns

RNG = np.random.default_rng(41)
KEYS = ["a", "b", "a", ("c", 1), "a", "b", "a", "a", ("c", 2)]

OLD_ROWS = [
    ("a", [0.1, 0.2, 1 / 3]), ("b", [0.7]), ("a", [0.3, 0.3]), ("a", [-1.25, 0.1, 0.1, 2 / 7]), ("c", [0.9, 0.1]),
    ("b", [0.1, 0.6]), ("a", [0.0]),
]  # fmt: skip
"""Group and rewards of the action turns of seven trajectories."""
OLD = {
    "group std": [
        "0x1.d13c6deb0db83p-1", "0x0.0p+0", "0x1.b32fab06af872p-1", "-0x1.8d5b07f4e6a94p+0", "0x0.0p+0",
        "0x0.0p+0", "-0x1.a6d8241fbfb33p-3",
    ],
    "group sample_std": [
        "0x1.92e8059267f36p-1", "0x0.0p+0", "0x1.78e1e4bb70e2cp-1", "-0x1.581ebff5f5470p+0", "0x0.0p+0",
        "0x0.0p+0", "-0x1.6e31a987b920cp-3",
    ],
    "group none": [
        "0x1.083a83a83a83ap-1", "0x0.0p+0", "0x1.ee52e52e52e52p-2", "-0x1.c35a35a35a359p-1", "0x0.0p+0",
        "0x0.0p+0", "-0x1.e04e04e04e052p-4",
    ],
    "leave_one_out": [
        "0x1.604e04e04e04dp-1", "0x0.0p+0", "0x1.498c98c98c98cp-1", "-0x1.2ce6ce6ce6ce6p+0", "0x0.0p+0",
        "0x0.0p+0", "-0x1.4034034034037p-3",
    ],
    "batch_mean std": [
        "0x1.9cf785d369341p-2", "0x1.0c15301ac63e1p-1", "0x1.5f5e18a257901p-2", "-0x1.0f39c01fe3e08p+1",
        "0x1.10a3cdbbcad01p+0", "0x1.0c15301ac63e1p-1", "-0x1.7ab5ca6872fc1p-1",
    ],
    "batch_mean none": [
        "0x1.c9aa518085bf4p-3", "0x1.29196d048723ep-2", "0x1.85660d3c417b0p-3", "-0x1.2c951275b9a4bp+0",
        "0x1.2e26501bdd2b9p-1", "0x1.29196d048723ep-2", "-0x1.a3b35fc845a8ep-2",
    ],
    "turn_return group": [
        "0x1.f36202ecfb9c9p-2", "0x1.7c57c57c57c54p-4", "-0x1.8618618618620p-7", "0x1.eb851eb851ec0p-6",
        "0x1.03ee721a54d88p-1", "-0x1.b6db6db6db6e0p-4", "-0x1.ddb6db6db6db8p-1", "0x1.d41d41d41d3e0p-7",
        "0x1.8618618618600p-7", "0x0.0p+0", "0x0.0p+0", "0x0.0p+0", "-0x1.eb851eb851ea0p-6", "0x0.0p+0",
        "-0x1.fe898231bcb58p-5",
    ],
    "turn_return none": [
        "0x1.199999999999ap-1", "0x1.0000000000000p-1", "0x1.5555555555555p-2", "0x1.6666666666666p-1",
        "0x1.23d70a3d70a3ep-1", "0x1.3333333333333p-2", "-0x1.bdce434a9b102p-1", "0x1.af8af8af8af8ap-2",
        "0x1.6db6db6db6db6p-2", "0x1.2492492492492p-2", "0x1.fae147ae147aep-1", "0x1.999999999999ap-4",
        "0x1.47ae147ae147bp-1", "0x1.3333333333333p-1", "0x0.0p+0",
    ],
}  # fmt: skip
"""Advantages that the functions of each kind gave before they became comparisons, at 9e9aa19."""
SETTINGS = {
    "group std": {"kind": "group"},
    "group sample_std": {"kind": "group", "scale": "sample_std"},
    "group none": {"kind": "group", "scale": "none"},
    "leave_one_out": {"kind": "leave_one_out"},
    "batch_mean std": {"kind": "batch_mean"},
    "batch_mean none": {"kind": "batch_mean", "scale": "none"},
    "turn_return group": {"kind": "turn_return", "discount": 0.9},
    "turn_return none": {"kind": "turn_return", "discount": 0.9, "baseline": "none"},
}


def compared(**settings):
    return ComparedAdvantage.model_validate(settings)


def by_turn(advantages, trajectories):
    """Return for each trajectory the advantage of the first token of each action turn."""
    rows, start = [], 0
    for t in trajectories:
        rows.append([float(advantages[start + turn.start]) for turn in t.turns if turn.action])
        start += len(t)
    return rows


@pytest.mark.parametrize("name", OLD)
def test_short_forms_are_what_they_were_bit_for_bit(name):
    trajectories = [
        make_turns(str(i), [{"r": value} for value in values], group=group, lengths=[1] * len(values))
        for i, (group, values) in enumerate(OLD_ROWS)
    ]
    credit = assign_advantages(AlgorithmConfig.model_validate({"advantage": SETTINGS[name]}), trajectories)
    rows = by_turn(credit.advantage, trajectories)
    if not name.startswith("turn_return"):
        assert all(len(set(row)) == 1 for row in rows)
        rows = [row[:1] for row in rows]
    values = [value for row in rows for value in row]
    if sys.version_info < (3, 12):
        assert [value.hex() for value in values] == OLD[name]
    else:
        # `sum` of floats rounds once from Python 3.12 on, so the return of several rewards may have another last bit.
        assert values == pytest.approx([float.fromhex(value) for value in OLD[name]], rel=1e-13, abs=0)


def slow_compare(values, keys, scale):
    """Compare value by value, with loops and the standard library."""
    result = []
    for value, key in zip(values, keys, strict=True):
        own = [v for v, k in zip(values, keys, strict=True) if k == key]
        mean, n = sum(own) / len(own), len(own)
        if n == 1:
            result.append(0.0)
        elif scale == "rank_normal":
            ranks = [j for j, v in enumerate(sorted(own)) if v == value]
            quantiles = [statistics.NormalDist().inv_cdf((j + 0.5) / n) for j in ranks]
            result.append(sum(quantiles) / len(quantiles))
        elif scale == "leave_one_out":
            result.append(value - (sum(own) - value) / (n - 1))
        else:
            deviation = {
                "std": statistics.pstdev(own), "sample_std": statistics.stdev(own), "none": 1 - 1e-6,
                "mean_abs": sum(abs(v - mean) for v in own) / n,
            }[scale]  # fmt: skip
            result.append((value - mean) / (deviation + 1e-6))
    return result


@pytest.mark.parametrize("scale", ["std", "sample_std", "mean_abs", "rank_normal", "leave_one_out", "none"])
def test_compare_against_a_loop(scale):
    values = RNG.integers(0, 4, len(KEYS)) + 0.25
    values[0] += 1
    np.testing.assert_allclose(
        compare(values, KEYS, scale=scale), slow_compare(values, KEYS, scale), atol=1e-12
    )
    assert has_peers(KEYS).tolist() == [True, True, True, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("rewards", "printed"),
    [
        ([0, 0, 0, 0, 1], [-0.320388] * 4 + [1.281552]),
        ([0.1, 0.1, 0.1, 0.2, 1], [-0.60, -0.60, -0.60, 0.52, 1.28]),
        ([0, 0, 1, 1, 1], [-0.90, -0.90, 0.60, 0.60, 0.60]),
        ([0.81, 0.81, 0.82, 0.82, 0.83], [-0.90, -0.90, 0.26, 0.26, 1.28]),
        ([0] * 7 + [1], [-0.219160] * 7 + [1.534121]),
        ([0] * 4 + [1] * 4, [-0.766839] * 4 + [0.766839] * 4),
    ],
)
def test_rank_normal_gives_the_printed_examples(rewards, printed):
    """arXiv:2604.08539 prints the examples of five, to two digits; those of eight are worked out in the cards."""
    got = compare(rewards, ["a"] * len(rewards), scale="rank_normal")
    np.testing.assert_allclose(got, printed, atol=5e-3)
    assert compare(np.exp(rewards), ["a"] * len(rewards), scale="rank_normal").tolist() == got.tolist()


def test_mean_abs_by_hand():
    """arXiv:2601.20614: one success of eight is worth 4, a failure -4/7, and the sizes add up to G = 8."""
    got = compare([1.0] + [0.0] * 7, ["a"] * 8, scale="mean_abs")
    np.testing.assert_allclose(got, [4.0] + [-4 / 7] * 7, atol=5e-5)
    assert np.abs(got).sum() == pytest.approx(8, abs=1e-4)
    np.testing.assert_allclose(spread([1.0] + [0.0] * 7, ["a"] * 8, scale="mean_abs"), 7 / 32)


def test_a_sum_with_weights_is_added_up():
    trajectories = [
        make_turns(str(i), [{"x": x, "y": y}]) for i, (x, y) in enumerate([(1, 0), (0, 4), (0, 5)])
    ]
    config = compared(terms=[{"value": "x", "scale": "none"}, {"value": "y", "scale": "none", "weight": 0.5}])
    # x less 1/3, and half of y less 3.
    np.testing.assert_allclose(
        compared_advantages(config, trajectories), [2 / 3 - 1.5, -1 / 3 + 0.5, -1 / 3 + 1.0], atol=1e-12
    )


def test_a_turn_gets_its_own_rewards_and_the_trajectory_its_sum():
    trajectories = [make_turns("t", [{"x": 1}, {"x": 2}]), make_turns("u", [{"x": 0}, {"x": 4}, {"x": 5}])]
    turn = compared(terms=[{"of": "turn", "value": "x", "among": ["group", "position"], "scale": "none"}])
    assert by_turn(compared_advantages(turn, trajectories), trajectories) == [[0.5, -1.0], [-0.5, 1.0, 0.0]]
    both = compared(
        terms=[{"value": "x", "scale": "none"}, {"of": "turn", "value": "x", "among": [], "scale": "none"}]
    )
    assert by_turn(compared_advantages(both, trajectories), trajectories) == [[-2.0, -1.0], [3.0, 7.0, 8.0]]


def test_anchors_of_two_groups_never_meet():
    config = compared(
        terms=[{"of": "turn", "value": "return", "among": ["group", "anchor"], "scale": "none"}]
    )
    trajectories = [
        make_turns("t", [{"x": 1}], group="a", anchors=["s"]), make_turns("u", [{"x": 0}], group="b", anchors=["s"]),
        make_turns("v", [{"x": 4}], group="b", anchors=["s"]), make_turns("w", [{"x": 9}], group="b"),
    ]  # fmt: skip
    assert by_turn(compared_advantages(config, trajectories), trajectories) == [[0.0], [-2.0], [2.0], [0.0]]


def test_whitened_over_trajectories_and_over_tokens():
    """1, 0, 0 and one token against two: over tokens the mean is 1/4 + ..., worked out by the standard library."""
    trajectories = [
        make_turns("t", [{"x": 1}], lengths=[1]),
        *(make_turns(n, [{}], lengths=[2]) for n in "uv"),
    ]
    terms = [{"scale": "none"}]
    advantages = [2 / 3, -1 / 3, -1 / 3]
    got = compared_advantages(compared(terms=terms, whiten="trajectories"), trajectories)
    np.testing.assert_allclose(
        got, [a / (statistics.stdev(advantages) + 1e-6) for a in advantages], atol=1e-12
    )
    tokens = [2 / 3, -1 / 3, -1 / 3, -1 / 3, -1 / 3]
    mean, deviation = statistics.mean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)
    got = compared_advantages(compared(terms=terms, whiten="tokens"), trajectories)
    np.testing.assert_allclose(
        [row[0] for row in by_turn(got, trajectories)],
        [(a - mean) / deviation for a in advantages],
        atol=1e-12,
    )
    prompts = [0, 1, 3, 4, 7, 8]
    assert not got[prompts].any()


def test_the_filter_asks_the_credit_rule():
    """Rewards (1, 0) and (0, 1) have equal sums, but each has a difference (arXiv:2601.05242)."""
    members = [make_turns("t", [{"x": 1, "y": 0}]), make_turns("u", [{"x": 0, "y": 1}])]
    assert not has_signal(compared(terms=[{}]), members)
    assert has_signal(compared(terms=[{"value": "x"}, {"value": "y", "weight": 2}]), members)
    # With equal weights the two differences cancel, and the group would train nothing.
    assert not has_signal(compared(terms=[{"value": "x"}, {"value": "y"}], whiten="trajectories"), members)
    assert not has_signal(compared(terms=[{}]), [])


def test_a_difference_of_turns_is_a_signal_though_returns_are_equal():
    members = [make_turns("t", [{"x": 1}, {"x": 0}]), make_turns("u", [{"x": 0}, {"x": 1}])]
    turn = {"of": "turn", "value": "return_to_go", "among": ["group", "position"]}
    assert has_signal(compared(terms=[turn]), members)
    assert not has_signal(compared(terms=[turn | {"value": "return"}]), members)


def test_an_unknown_comparison_is_refused():
    for wrong in ({"terms": []}, {"terms": [{"among": ["tool"]}]}, {"terms": [{"weight": "size"}]}):
        with pytest.raises(ValidationError):
            compared(**wrong)
