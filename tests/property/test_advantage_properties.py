"""Properties of advantages and value targets for any numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages import (
    adaptive_trace,
    compare,
    extended_gae,
    informative_scale,
    median_relative_advantage,
    tail_mask,
    token_group_advantage,
    whiten,
)
from learner.algorithms.values import explained_variance, lambda_returns, value_loss, vtrace_targets

patient = settings(deadline=None)
"""Settings without a deadline, so that no test fails on a loaded machine."""

numbers = st.floats(-1e4, 1e4)
shares = st.floats(0, 1)
members = st.lists(
    st.tuples(numbers | st.sampled_from([0.0, 1.0]), st.integers(0, 50), st.sampled_from("abc")),
    min_size=1,
    max_size=16,
)
steps = st.lists(st.tuples(numbers, numbers, st.floats(-20, 20)), min_size=1, max_size=20)

KINDS = {
    "group": lambda r, n, g: compare(r, g, scale="std"),
    "sample_std": lambda r, n, g: compare(r, g, scale="sample_std"),
    "none": lambda r, n, g: compare(r, g, scale="none"),
    "mean_abs": lambda r, n, g: compare(r, g, scale="mean_abs"),
    "rank_normal": lambda r, n, g: compare(r, g, scale="rank_normal"),
    "leave_one_out": lambda r, n, g: compare(r, g, scale="leave_one_out"),
    "median": lambda r, n, g: median_relative_advantage(r, g),
    "tokens": lambda r, n, g: token_group_advantage(r, n, g),
    "batch": lambda r, n, g: compare(r, [""] * len(r), scale="std"),
}
kinds = st.sampled_from(sorted(KINDS))


def columns(rows):
    returns, lengths, groups = zip(*rows, strict=True)
    return np.array(returns), np.array(lengths), list(groups)


@patient
@given(members, kinds)
def test_advantages_are_finite_and_of_the_right_shape(rows, kind):
    advantages = KINDS[kind](*columns(rows))
    assert advantages.shape == (len(rows),)
    assert advantages.dtype == np.float64
    assert np.isfinite(advantages).all()


@patient
@given(members, kinds, st.randoms(use_true_random=False))
def test_order_of_trajectories_does_not_matter(rows, kind, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    straight, shuffled = KINDS[kind](*columns(rows)), KINDS[kind](*columns([rows[i] for i in order]))
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6, atol=1e-6)


@patient
@given(members, st.sampled_from(["group", "sample_std", "none", "mean_abs", "rank_normal", "leave_one_out"]))
def test_a_group_is_worth_nothing_on_average(rows, kind):
    returns, lengths, groups = columns(rows)
    advantages = KINDS[kind](returns, lengths, groups)
    for group in set(groups):
        mine = np.array([g == group for g in groups])
        assert (
            abs(advantages[mine].sum()) <= 1e-9 * max(1.0, np.abs(advantages[mine]).max()) * len(rows) + 1e-6
        )


@patient
@given(members)
def test_half_of_a_group_is_on_each_side_of_the_median(rows):
    returns, _, groups = columns(rows)
    advantages = median_relative_advantage(returns, groups)
    for group in set(groups):
        mine = advantages[[g == group for g in groups]]
        assert 2 * (mine > 0).sum() <= len(mine)
        assert 2 * (mine < 0).sum() <= len(mine)


@patient
@given(members, st.floats(0.5, 8))
def test_token_advantages_sum_to_zero_over_tokens_or_are_those_of_grpo(rows, ceiling):
    returns, lengths, groups = columns(rows)
    advantages = token_group_advantage(returns, lengths, groups, ceiling=ceiling)
    assert (advantages[lengths == 0] == 0).all()
    for group in set(groups):
        mine = np.array([g == group for g in groups]) & (lengths > 0)
        balanced = abs((advantages * lengths)[mine].sum()) <= 1e-6 * max(1, lengths[mine].sum())
        below = np.abs(advantages[mine]).max(initial=0) < ceiling
        plain = compare(returns[mine], ["g"] * mine.sum(), scale="std")
        assert (balanced and below) or np.allclose(advantages[mine], plain)


@patient
@given(members)
def test_the_informative_scale_restores_the_number_of_groups(rows):
    returns, _, groups = columns(rows)
    scale = informative_scale(returns, groups)
    signal = {
        g for g, a in zip(groups, compare(returns, groups, scale="leave_one_out"), strict=True) if a != 0
    }
    assert scale * len(signal) == pytest.approx(len(set(groups)) if signal else 0)
    assert scale >= 1


@patient
@given(st.lists(st.tuples(numbers, st.booleans()), max_size=20))
def test_whitened_values_have_mean_zero_and_variance_one_above_the_floor_or_vanish(rows):
    values, mask = np.array([v for v, _ in rows]), np.array([m for _, m in rows], dtype=bool)
    result = whiten(values, mask)
    assert (result[~mask] == 0).all()
    if result.any():
        # A spread of 1e-9 is the least that counts; near values of 1e4, rounding loses at most 1e-7 of it.
        assert result[mask].mean() == pytest.approx(0, abs=1e-3)
        # The floor of 1e-8 under the variance keeps the advantages of values that hardly differ small.
        variance = values[mask].var()
        assert result[mask].var() == pytest.approx(variance / (variance + 1e-8), abs=1e-3)


@patient
@given(st.lists(st.tuples(st.lists(numbers, max_size=5), st.sampled_from("ab")), max_size=8))
def test_turn_advantages_cancel_at_each_turn(rows):
    returns, groups = [np.array(row) for row, _ in rows], [group for _, group in rows]
    keys = [(group, j) for row, group in zip(returns, groups, strict=True) for j in range(len(row))]
    flat = compare(np.concatenate([np.zeros(0), *returns]), keys, scale="none")
    result = np.split(flat, np.cumsum([len(row) for row in returns]))[: len(returns)]
    for group in set(groups):
        mine = [row for row, g in zip(result, groups, strict=True) if g == group]
        for j in range(max(map(len, mine))):
            assert abs(sum(row[j] for row in mine if len(row) > j)) < 1e-6


@patient
@given(steps, shares, shares, st.booleans())
def test_on_policy_vtrace_and_lambda_returns_agree(rows, discount, trace, finished):
    rewards, values, _ = (np.array(column) for column in zip(*rows, strict=True))
    after = 0.0 if finished else float(values[-1])
    advantages = extended_gae(rewards, values, finished=finished, discount=discount, trace=trace)
    targets, _ = vtrace_targets(
        rewards, values, np.ones(len(rows)), bootstrap=after, discount=discount, trace=trace
    )
    np.testing.assert_allclose(targets, lambda_returns(advantages, values), rtol=1e-9, atol=1e-6)


@patient
@given(steps, st.floats(0, 0.99), st.floats(0.5, 1), st.floats(1, 4))
def test_vtrace_stays_finite_and_bounded(rows, discount, ceiling_c, ceiling_rho):
    """If c is at most 1, the error of the values is at most rho / (1 - gamma) times the largest delta."""
    rewards, values, log_ratios = (np.array(column) for column in zip(*rows, strict=True))
    result = vtrace_targets(
        rewards,
        values,
        np.exp(log_ratios),
        bootstrap=0.0,
        discount=discount,
        ceiling_rho=ceiling_rho,
        ceiling_c=ceiling_c,
    )
    assert np.isfinite(result.advantages).all()
    largest = np.abs(rewards + discount * np.append(values[1:], 0.0) - values).max()
    assert (
        np.abs(result.targets - values) <= ceiling_rho * largest / (1 - discount) * (1 + 1e-9) + 1e-6
    ).all()


@patient
@given(steps, st.integers(1, 20), shares, shares)
def test_the_last_window_needs_nothing_of_the_earlier_ones(rows, size, discount, trace):
    rewards, values, _ = (np.array(column) for column in zip(*rows, strict=True))
    full = extended_gae(rewards, values, finished=True, discount=discount, trace=trace)
    last = extended_gae(rewards[-size:], values[-size:], finished=True, discount=discount, trace=trace)
    np.testing.assert_array_equal(full[-size:], last)


@patient
@given(
    st.integers(1, 100_000), st.booleans(), st.integers(0, 50_000), st.floats(1e-3, 10), st.floats(0, 0.999)
)
def test_adaptive_trace_stays_between_base_and_one_and_grows(length, unfinished, window, alpha, base):
    trace = adaptive_trace(length, unfinished=unfinished, window=window, alpha=alpha, base=base)
    assert base <= trace < 1
    assert trace <= adaptive_trace(length + 1, unfinished=unfinished, window=window, alpha=alpha, base=base)


@patient
@given(st.integers(0, 50), st.booleans(), st.integers(0, 60))
def test_the_tail_is_as_long_as_asked_for(n, finished, ignore):
    mask = tail_mask(n, finished=finished, ignore=ignore)
    assert mask.shape == (n,)
    assert mask.sum() == (n if finished else max(0, n - ignore))
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)


@patient
@given(steps, st.floats(0, 5), st.floats(0, 5))
def test_a_clipped_value_loss_is_finite_and_never_below_the_plain_one(rows, low, high):
    values, targets, before = (torch.tensor(column) for column in zip(*rows, strict=True))
    values.requires_grad_()
    plain = value_loss(values, targets, None, clip_low=low, clip_high=high)
    clipped = value_loss(values, targets, before, clip_low=low, clip_high=high)
    assert (clipped >= plain).all()
    clipped.sum().backward()
    error = (values - targets).detach()
    moves = (values.grad == 0) | torch.isclose(values.grad, error)
    assert moves.all()


@patient
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), numbers)
def test_explained_variance_is_at_most_one_and_blind_to_an_offset(rows, offset):
    targets, values = (np.round(column, 3) for column in zip(*rows, strict=True))
    share = explained_variance(targets, values)
    if np.ptp(targets) == 0:
        assert np.isnan(share)
    else:
        assert share <= 1
        shifted = explained_variance(targets, values + offset)
        assert shifted == pytest.approx(share, rel=1e-3, abs=1e-3)
