"""Properties of adaptive clip bounds and KL penalties for any numbers, with log ratios up to ±20."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.entropy import (
    entropy_change,
    entropy_quadrants,
    entropy_signal,
    hapo_bounds,
    hapo_redistribute,
)
from learner.algorithms.regularisers import base_share, kl_convex, next_entropy_coefficient
from learner.algorithms.surrogates import (
    balance_path,
    balance_sums,
    choose_bounds,
    clipped_surrogate,
    lag_bounds,
)

measures = st.sampled_from(["value", "gradient"])
orders = st.sampled_from(["paper", "code"])
tokens = st.lists(st.tuples(st.floats(-20, 20), st.floats(-10, 10), st.floats(0, 1)), min_size=1, max_size=20)
spans = st.tuples(st.floats(0.1, 0.9), st.floats(0, 0.5), st.floats(1, 2), st.floats(0, 3))
steps = st.tuples(st.floats(0.01, 0.5), st.floats(0.05, 1.0))
entropies = st.lists(st.floats(0, 12), min_size=1, max_size=30)


def columns(rows):
    log_ratio, *rest = (torch.tensor(column) for column in zip(*rows, strict=True))
    return log_ratio, log_ratio.exp(), *rest


def path_of(span, step, order):
    low, low_width, high, high_width = span
    return balance_path(
        low=(low, low + low_width),
        high=(high, high + high_width),
        low_step=step[0],
        high_step=step[1],
        order=order,
    )


@given(spans, steps, orders)
def test_a_path_stays_inside_and_never_goes_back(span, step, order):
    path = path_of(span, step, order)
    low, low_width, high, high_width = span
    assert path[0] == (round(low, 12), round(high, 12))
    for (low_a, high_a), (low_b, high_b) in pairwise(path):
        assert (low_a == low_b) != (high_a == high_b)
        assert low_b >= low_a
        assert high_b >= high_a
    assert path[-1][0] <= low + low_width + 1e-8
    assert path[-1][1] <= high + high_width + 1e-8
    if order == "code":
        assert low + low_width - path[-1][0] < step[0] + 1e-8
        assert high + high_width - path[-1][1] < step[1] + 1e-8


def shares(sums):
    return [p / (p + n) if n > 0 else 1.0 for p, n in sums.tolist()]


@given(tokens, spans, steps, orders)
def test_gradient_share_never_falls_along_a_path(rows, span, step, order):
    _, ratio, advantage, weight = columns(rows)
    path = path_of(span, step, order)
    sums = balance_sums(ratio, advantage, weight, path, measure="gradient")
    assert (np.diff(shares(sums)) >= -1e-9).all()


@given(tokens, spans, steps)
def test_value_share_rises_with_high_and_falls_with_low(rows, span, step):
    _, ratio, advantage, weight = columns(rows)
    path = path_of(span, step, "paper")
    share = shares(balance_sums(ratio, advantage, weight, path, measure="value"))
    for (a, b), (before, after) in zip(pairwise(path), pairwise(share), strict=True):
        assert after >= before - 1e-9 if b[1] > a[1] else after <= before + 1e-9


@given(tokens, spans, steps, orders, measures, st.floats(0, 1), st.randoms())
def test_chosen_bounds_are_the_first_that_meet_the_target(rows, span, step, order, measure, target, random):
    _, ratio, advantage, weight = columns(rows)
    path = path_of(span, step, order)
    sums = balance_sums(ratio, advantage, weight, path, measure=measure)
    assert torch.isfinite(sums).all()
    assert (sums >= 0).all()
    found = choose_bounds(sums, path, target=target)
    assert found[:2] == path[found.moves]
    assert 0 <= found.share <= 1
    assert found.share >= target or found.moves == len(path) - 1
    assert all(share < target for share in shares(sums)[: found.moves])
    shuffled = list(rows)
    random.shuffle(shuffled)
    _, ratio, advantage, weight = columns(shuffled)
    again = balance_sums(ratio, advantage, weight, path, measure=measure)
    torch.testing.assert_close(again, sums, rtol=1e-9, atol=1e-12)


@given(entropies, st.floats(0, 1), st.randoms())
def test_entropy_signal_is_bounded_and_keeps_the_order(values, quantile, random):
    signal = entropy_signal(torch.tensor(values), quantile=quantile)
    assert torch.isfinite(signal).all()
    assert (signal.abs() <= 1).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(signal.numpy()[order]) >= 0).all()
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    again = entropy_signal(torch.tensor(values)[shuffled], quantile=quantile)
    assert torch.equal(again, signal[shuffled])


@given(
    st.lists(st.tuples(st.floats(-20, 20), st.floats(-10, 10), st.floats(-1, 1)), min_size=1, max_size=20),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
def test_hapo_is_bounded_and_finite(rows, low, high):
    logp, _, advantage, signal = columns(rows)
    logp.requires_grad_()
    left, right = hapo_bounds(signal, low=low, high=high)
    assert ((left >= torch.tensor(low)) & (left <= 2 * torch.tensor(low))).all()
    assert ((right >= torch.tensor(high)) & (right <= 2 * torch.tensor(high))).all()
    ratio = logp.exp()
    moved = hapo_redistribute(advantage, ratio, signal, low=low, high=high)
    assert not moved.requires_grad
    assert (moved * advantage >= 0).all()
    assert (moved.abs() <= 2 * advantage.abs()).all()
    objective = clipped_surrogate(ratio, moved, low=left, high=right)
    objective.sum().backward()
    assert torch.isfinite(objective).all()
    assert torch.isfinite(logp.grad).all()


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=20),
    st.floats(0, 0.99),
    st.floats(0, 5),
    st.floats(0, 10),
)
def test_lag_bounds_only_contract(lags, low, high, contraction):
    order = sorted(lags)
    left, right = lag_bounds(
        torch.tensor(order, dtype=torch.float64), low=low, high=high, contraction=contraction
    )
    assert ((left >= 0) & (left <= low)).all()
    assert ((right >= 0) & (right <= high)).all()
    assert (left.diff() <= 0).all()
    assert (right.diff() <= 0).all()


@given(
    st.lists(st.tuples(st.floats(-20, 0), st.floats(-10, 10), st.booleans()), min_size=1, max_size=30),
    st.randoms(),
)
def test_quadrants_add_up_to_the_change_of_entropy(rows, random):
    logp, advantage, active = (torch.tensor(column) for column in zip(*rows, strict=True))
    total = entropy_change(logp, advantage, active)
    assert torch.isfinite(total)
    parts = entropy_quadrants(logp, advantage, active)
    torch.testing.assert_close(sum(parts), total, rtol=1e-9, atol=1e-9)
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    again = entropy_quadrants(logp[shuffled], advantage[shuffled], active[shuffled])
    torch.testing.assert_close(torch.stack(again), torch.stack(parts), rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=20),
    st.floats(0, 1),
    st.sampled_from(["k1", "k2", "k3"]),
)
def test_kl_convex_and_its_gradient_are_finite(rows, share, estimator):
    base, before = (torch.tensor(column) for column in zip(*rows, strict=True))
    now = torch.zeros(len(rows), requires_grad=True)
    penalty = kl_convex(now, base, before, base_share=share, estimator=estimator)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert torch.isfinite(now.grad).all()
    if estimator != "k1":
        assert (penalty >= 0).all()


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(1, 100), st.floats(0, 1), st.floats(0, 1))
def test_base_share_only_falls_to_its_floor(step, hold, every, drop, floor):
    settings = {"hold": hold, "every": every, "drop": drop, "floor": floor}
    assert floor <= base_share(step + 1, **settings) <= base_share(step, **settings) <= 1


@given(
    st.lists(st.floats(0, 12), min_size=1, max_size=50),
    st.floats(0, 2),
    st.floats(1e-6, 0.1),
    st.floats(0, 1),
)
def test_entropy_coefficient_stays_in_range(measured, target, change, maximum):
    coefficient = 0.0
    for entropy in measured:
        after = next_entropy_coefficient(coefficient, entropy, target=target, change=change, maximum=maximum)
        assert 0 <= after <= maximum
        assert after >= coefficient if entropy < target else after <= coefficient
        coefficient = after
