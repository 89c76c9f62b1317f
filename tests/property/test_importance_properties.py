"""Properties of ratios, corrections and surrogates for any numbers, with log ratios up to ±20."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.penalties import (
    bounded_surrogate,
    bounded_target,
    mirror_descent_surrogate,
    mirror_step_size,
    next_dual,
    ratio_variance_surrogate,
)
from learner.algorithms.ratios import (
    effective_sample_size,
    importance_ratio,
    interpolated_proximal,
    interval_correction,
    learning_rate_factor,
    level_ratio,
    segment_mean,
    truncated_correction,
)
from learner.algorithms.surrogates import (
    chunk_surrogate,
    dual_clipped_surrogate,
    minirl_surrogate,
    triplet_clipped_surrogate,
    weighted_surrogate,
    window_clipped_surrogate,
)

quarters = st.integers(-40, 40).map(lambda n: n / 4)
"""Advantages without denormal numbers, because a denormal times a ratio may vanish."""
tokens = st.lists(
    st.tuples(st.floats(-20, 20), st.floats(-20, 20), quarters, st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=20,
)
seeds = st.integers(0, 2**31)

CLIPS = {
    "dual": lambda lp, s, w, a: dual_clipped_surrogate(s, a, low=0.2, high=0.28, ceiling=3.0),
    "plain": lambda lp, s, w, a: dual_clipped_surrogate(w, a, low=0.2, high=0.28),
    "window": lambda lp, s, w, a: window_clipped_surrogate(w, (w / s).detach(), a, epsilon=0.2),
    "triplet": lambda lp, s, w, a: triplet_clipped_surrogate(
        w, a, negative_low=0.8, negative_high=5.0, positive_high=1.28
    ),
    "minirl": lambda lp, s, w, a: minirl_surrogate(lp, s, w, a, low=0.2, high=0.27, ceiling=5.0),
}
OTHERS = {
    "weighted": lambda lp, s, w, a: weighted_surrogate(lp, w, a, high=2.0),
    "chunk": lambda lp, s, w, a: chunk_surrogate(lp, s, a),
    "ratio_variance": lambda lp, s, w, a: ratio_variance_surrogate(w, a, dual=4.0),
    "bounded": lambda lp, s, w, a: bounded_surrogate(
        s, bounded_target(a, low=0.3, high=0.3, temperature=1e-4), a.abs()
    ),
    "mirror_descent": lambda lp, s, w, a: mirror_descent_surrogate(s, a, step_size=0.01),
}
ALL = {**CLIPS, **OTHERS}


def policies(rows):
    """Return behaviour, proximal and current log-probabilities, advantages, sequence ids and turn ids."""
    current_proximal, proximal_behaviour, advantage, sequence, turn = zip(*rows, strict=True)
    behaviour = torch.full((len(rows),), -1.0)
    proximal = behaviour + torch.tensor(proximal_behaviour)
    current = (proximal + torch.tensor(current_proximal)).requires_grad_()
    return behaviour, proximal, current, torch.tensor(advantage), torch.tensor(sequence), torch.tensor(turn)


def evaluate(surrogate, rows):
    behaviour, proximal, current, advantage, *_ = policies(rows)
    value, clipped = surrogate(
        current, importance_ratio(current, proximal), importance_ratio(current, behaviour), advantage
    )
    value.sum().backward()
    return value.detach(), clipped, current.grad


@pytest.mark.parametrize("name", ALL)
@given(tokens)
def test_values_and_gradients_are_finite(name, rows):
    value, clipped, gradient = evaluate(ALL[name], rows)
    assert value.shape == clipped.shape == (len(rows),)
    assert value.dtype == torch.float32
    assert clipped.dtype == torch.bool
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ALL)
@given(tokens)
def test_clipped_tokens_have_no_gradient(name, rows):
    _, clipped, gradient = evaluate(ALL[name], rows)
    assert (gradient[clipped] == 0).all()


@pytest.mark.parametrize("name", CLIPS)
@given(tokens)
def test_only_clipped_tokens_have_no_gradient(name, rows):
    """Log ratios stay away from the limit, where `importance_ratio` itself has no gradient."""
    rows = [(0.49 * s, 0.49 * d, *rest) for s, d, *rest in rows]
    _, clipped, gradient = evaluate(CLIPS[name], rows)
    advantage = torch.tensor([row[2] for row in rows])
    assert torch.equal(clipped, (gradient == 0) & (advantage != 0))


@pytest.mark.parametrize("name", ALL)
@given(tokens, seeds)
def test_the_order_of_tokens_does_not_matter(name, rows, seed):
    order = np.random.default_rng(seed).permutation(len(rows))
    for there, moved in zip(
        evaluate(ALL[name], rows), evaluate(ALL[name], [rows[i] for i in order]), strict=True
    ):
        assert torch.equal(there[torch.tensor(order)], moved)


@pytest.mark.parametrize("name", CLIPS)
@given(tokens)
def test_a_clip_points_the_way_of_the_advantage(name, rows):
    _, _, gradient = evaluate(CLIPS[name], rows)
    advantage = torch.tensor([row[2] for row in rows])
    assert (gradient * advantage >= 0).all()


@given(tokens, st.floats(0, 0.9), st.floats(0, 3), st.floats(1.01, 10))
def test_the_dual_clip_is_bounded_on_both_sides(rows, low, high, ceiling):
    _, _, current, advantage, *_ = policies(rows)
    ratio = importance_ratio(current, torch.zeros(len(rows)))
    value, _ = dual_clipped_surrogate(ratio, advantage, low=low, high=high, ceiling=ceiling)
    assert (value <= (1 + high) * advantage.clamp(min=0) * (1 + 1e-6)).all()
    assert (value >= ceiling * advantage.clamp(max=0) * (1 + 1e-6)).all()


@given(tokens, st.floats(0, 0.9))
def test_the_window_opens_where_the_proximal_policy_stands(rows, epsilon):
    behaviour, proximal, _, advantage, *_ = policies(rows)
    centre = importance_ratio(proximal, behaviour)
    value, clipped = window_clipped_surrogate(centre, centre, advantage, epsilon=epsilon)
    assert not clipped.any()
    assert torch.equal(value, centre * advantage)


@given(tokens, st.floats(0.01, 1))
def test_the_divergence_of_mirror_descent_is_never_negative(rows, step_size):
    near = torch.tensor([1 + row[0] * 1e-8 for row in rows], dtype=torch.float32)
    _, proximal, current, *_ = policies(rows)
    for ratio in (near, importance_ratio(current, proximal)):
        penalty = mirror_descent_surrogate(ratio, torch.zeros_like(ratio), step_size=step_size).value
        assert (penalty <= 0).all()


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@given(tokens, seeds)
def test_a_ratio_of_any_level_is_bounded_and_finite(level, rows, seed):
    behaviour, _, current, advantage, sequence, turn = policies(rows)
    ratio = level_ratio(current * 3, behaviour, level=level, sequence=sequence, turn=turn)
    assert (ratio >= 2e-9).all()
    assert (ratio <= 4.9e8).all()
    (ratio * advantage).sum().backward()
    assert torch.isfinite(current.grad).all()
    order = torch.tensor(np.random.default_rng(seed).permutation(len(rows)))
    moved = level_ratio(
        (current * 3)[order], behaviour[order], level=level, sequence=sequence[order], turn=turn[order]
    )
    torch.testing.assert_close(ratio[order], moved, rtol=1e-4, atol=0)


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 4)), min_size=1, max_size=20))
def test_segment_means_keep_the_sum_and_stay_within_their_segment(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    segment = torch.tensor([id_ for _, id_ in rows])
    means = segment_mean(values, segment)
    assert means.sum().item() == pytest.approx(values.sum().item(), abs=1e-9)
    for id_ in segment.unique():
        members = values[segment == id_]
        assert len(means[segment == id_].unique()) == 1
        assert (means[segment == id_] >= members.min() - 1e-9).all()
        assert (means[segment == id_] <= members.max() + 1e-9).all()
    assert torch.equal(means, segment_mean(values, segment * 10**12 + 7))


@given(tokens, st.integers(0, 100), st.sampled_from(["current", "behaviour"]))
def test_the_interpolated_policy_lies_between(rows, lag, fresh):
    behaviour, _, current, *_ = policies(rows)
    proximal = interpolated_proximal(behaviour, current, torch.full((len(rows),), lag), fresh=fresh)
    assert not proximal.requires_grad
    assert (proximal >= torch.minimum(behaviour, current) - 1e-5).all()
    assert (proximal <= torch.maximum(behaviour, current) + 1e-5).all()


@given(tokens, st.floats(0.01, 100), st.floats(0, 1), st.floats(0, 10), st.booleans())
def test_corrections_keep_their_bounds(rows, ceiling, low, width, keep_weight):
    behaviour, proximal, *_ = policies(rows)
    ratio = importance_ratio(proximal, behaviour)
    weight, cut = truncated_correction(ratio, ceiling=ceiling)
    assert (weight > 0).all()
    assert (weight <= torch.tensor(ceiling)).all()
    assert torch.equal(weight[~cut], ratio[~cut])
    weight, cut = interval_correction(ratio, low=low, high=low + width, keep_weight=keep_weight)
    assert (weight[cut] == 0).all()
    assert torch.equal(weight[~cut], ratio[~cut] if keep_weight else torch.ones(int((~cut).sum())))


@given(tokens)
def test_the_learning_rate_never_rises(rows):
    behaviour, proximal, *_ = policies(rows)
    share = effective_sample_size(importance_ratio(proximal, behaviour)).item()
    linear, root = learning_rate_factor(share), learning_rate_factor(share, rule="sqrt")
    assert 0 < linear <= root <= 1


@given(st.floats(0, 1e6), st.floats(0, 1e18), st.floats(1e-3, 10), st.floats(0, 10))
def test_the_dual_variable_moves_towards_its_bound(dual, mean_square, bound, rate):
    after = next_dual(dual, mean_square, bound=bound, rate=rate)
    assert after >= 0
    assert after >= dual if mean_square > bound else after <= dual
    assert next_dual(dual, mean_square, bound=bound, rate=rate, ceiling=50.0) == min(after, 50.0)


@given(st.lists(quarters, min_size=1, max_size=20), st.floats(0, 0.9), st.floats(0, 3), st.floats(1e-6, 10))
def test_targets_lie_within_the_bounds_and_rise_with_the_advantage(advantages, low, high, temperature):
    target = bounded_target(torch.tensor(sorted(advantages)), low=low, high=high, temperature=temperature)
    assert (target >= 1 - low - 1e-6).all()
    assert (target <= 1 + high + 1e-6).all()
    assert (target.diff() >= 0).all()


@given(st.integers(1, 1000), st.integers(1, 500))
def test_mirror_steps_fall_and_stay_positive(k, total):
    assert 0 < mirror_step_size(k + 1, total) <= mirror_step_size(k, total) <= 1
