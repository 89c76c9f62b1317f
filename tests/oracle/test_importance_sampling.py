"""Test ratios, corrections and surrogates against slow twins, loops over tokens written from the papers.

The numbers in this file were worked out by hand; the docstring of each test shows how.
"""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from learner.algorithms.penalties import (
    bounded_surrogate,
    bounded_target,
    mirror_descent_surrogate,
    mirror_step_size,
    next_dual,
    ratio_variance_surrogate,
)
from learner.algorithms.ratios import (
    importance_ratio,
    interpolated_proximal,
    interval_correction,
    learning_rate_factor,
    level_ratio,
    product_ratio,
    segment_mean,
    segment_ratio,
    truncated_correction,
)
from learner.algorithms.surrogates import (
    chunk_surrogate,
    clip_active,
    clipped_surrogate,
    dual_clipped_surrogate,
    minirl_surrogate,
    triplet_clipped_surrogate,
    weighted_surrogate,
    window_clipped_surrogate,
)

RNG = np.random.default_rng(17)
N = 300


def tensor(values, *, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def draws():
    """Return ratios around 1, some far out, and advantages of both signs, some of them 0."""
    return RNG.lognormal(0, 1.0, N), RNG.normal(size=N) * (RNG.random(N) < 0.9)


def clip(x, low, high):
    return low if x < low else high if x > high else x


def gradient(function, at):
    """Return d/dx of each token's value; values must not depend on other tokens."""
    x = tensor(at, grad=True)
    function(x).value.sum().backward()
    return x.grad.numpy()


def slopes(function, ratios):
    """Return d/dx of each token's value by central differences.

    Tokens within one step of a kink would differ, so the tests draw ratios at random, not by choice.
    """
    step = 1e-6
    up, down = function(tensor(ratios + step)).value, function(tensor(ratios - step)).value
    return ((up - down) / (2 * step)).numpy()


def check_ratio_surrogate(function, ratios, expected):
    """Compare values with the twin's, gradients with finite differences, ``clipped`` with zero slopes."""
    got = function(tensor(ratios))
    assert_allclose(got.value, expected, rtol=1e-12, atol=1e-12)
    derivative = gradient(function, ratios)
    assert_allclose(derivative, slopes(function, ratios), rtol=1e-4, atol=1e-5)
    assert (derivative[got.clipped.numpy()] == 0).all()


# --- ratios ---------------------------------------------------------------------------------------------------


def test_segment_means_equal_the_loop():
    values, segment = RNG.normal(size=40), RNG.choice([3, 0, 900_000_000_007, 12], 40)
    x = tensor(values, grad=True)
    got = segment_mean(x, torch.tensor(segment))
    for i in range(40):
        members = [values[j] for j in range(40) if segment[j] == segment[i]]
        assert got[i].item() == pytest.approx(sum(members) / len(members), abs=1e-14)
    upstream = RNG.normal(size=40)
    (got * tensor(upstream)).sum().backward()
    for i in range(40):
        members = [upstream[j] for j in range(40) if segment[j] == segment[i]]
        assert x.grad[i].item() == pytest.approx(sum(members) / len(members), abs=1e-14)


def test_segment_mean_of_nothing_is_nothing():
    assert segment_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="segment"):
        segment_mean(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    ids = torch.zeros(3, dtype=torch.int64)
    for level in ("token", "turn", "sequence"):
        with pytest.raises(ValueError, match="one shape"):
            level_ratio(torch.zeros(3), torch.zeros(1), level=level, sequence=ids, turn=ids)


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_ratio_of_a_segment_is_the_root_of_the_product(level):
    """GSPO, equation 7: (π(y)/π'(y))^(1/|y|)."""
    p, q = RNG.uniform(0.05, 0.9, 30), RNG.uniform(0.05, 0.9, 30)
    sequence = RNG.integers(4, size=30)
    turn = sequence * 10 + RNG.integers(3, size=30)
    segment = turn if level == "turn" else sequence
    got = level_ratio(
        tensor(p).log(),
        tensor(q).log(),
        level=level,
        sequence=torch.tensor(sequence),
        turn=torch.tensor(turn),
    )
    for i in range(30):
        members = [j for j in range(30) if segment[j] == segment[i]]
        product = math.prod(p[j] / q[j] for j in members)
        assert got[i].item() == pytest.approx(product ** (1 / len(members)), rel=1e-12)


def test_ratio_of_a_group_is_the_root_of_the_product_over_its_answers():
    """Group 0 has answers of 1 and 3 tokens, group 1 one of 2: ratios 2, 1/2, 4, 4 give (16)^(1/4) = 2."""
    ratios, group = tensor([2.0, 3.0, 0.5, 4.0, 1 / 3, 4.0]), torch.tensor([0, 1, 0, 0, 1, 0])
    got = segment_ratio(ratios.log(), torch.zeros(6), group)
    assert got.tolist() == pytest.approx([2.0, 1.0, 2.0, 2.0, 1.0, 2.0])


def test_product_ratio_equals_the_loop_and_verl():
    """verl, rollout_is = "sequence": exp(clamp(sum of log-ratios, 20)) for all tokens, then a ceiling."""
    rng = np.random.default_rng(21)
    p, q = rng.uniform(0.05, 1, 40), rng.uniform(0.05, 1, 40)
    sequence = rng.integers(0, 5, 40)
    got = product_ratio(tensor(p).log(), tensor(q).log(), torch.tensor(sequence))
    weight, cut = truncated_correction(got, ceiling=2.0)
    for i in range(40):
        product = math.prod(p[j] / q[j] for j in range(40) if sequence[j] == sequence[i])
        assert got[i].item() == pytest.approx(product, rel=1e-12)
        assert weight[i].item() == pytest.approx(min(product, 2.0), rel=1e-12)
        assert cut[i].item() == (product > 2.0)


def test_the_product_is_the_power_of_the_sequence_ratio_and_has_its_limits():
    sequence = torch.tensor([0, 0, 5, 0])
    a, b = tensor([-1.0, -2.0, -3.0, -0.5]), tensor([-1.5, -1.0, -1.0, -0.9])
    mean = segment_ratio(a, b, sequence)
    assert_allclose(product_ratio(a, b, sequence), mean ** torch.tensor([3, 3, 1, 3]))
    far = product_ratio(tensor([15.0, 15.0, -50.0]), torch.zeros(3), torch.tensor([0, 0, 1]))
    assert far.tolist() == pytest.approx([math.exp(20), math.exp(20), math.exp(-20)])
    assert product_ratio(a, a, sequence).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="one shape"):
        product_ratio(torch.zeros(3), torch.zeros(1), sequence)


def test_weights_by_the_product_have_no_bias():
    """All trajectories of two tokens over a binary alphabet: Σ μ(y) w(y) f(y) = Σ π(y) f(y)."""
    mu, pi = np.array([[0.3, 0.7], [0.8, 0.2]]), np.array([[0.6, 0.4], [0.5, 0.5]])
    rows = [(i, j) for i in range(2) for j in range(2)]
    f = {row: float(k**2 + 1) for k, row in enumerate(rows)}
    logp = {name: torch.tensor([[p[0, i], p[1, j]] for i, j in rows]).log().flatten()
            for name, p in (("mu", mu), ("pi", pi))}  # fmt: skip
    weight = product_ratio(logp["pi"], logp["mu"], torch.arange(4).repeat_interleave(2))[::2].tolist()
    found = sum(mu[0, i] * mu[1, j] * w * f[i, j] for (i, j), w in zip(rows, weight, strict=True))
    assert found == pytest.approx(sum(pi[0, i] * pi[1, j] * f[i, j] for i, j in rows), rel=1e-12)


def test_one_weight_for_a_group_leaves_its_advantages_balanced():
    """Two answers of two tokens, advantages 1 and -1: weights by token would make their sum differ from 0."""
    advantage, group = tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4, dtype=torch.int64)
    logp = tensor([1.8, 1.1, 0.4, 0.7]).log()
    assert (segment_ratio(logp, torch.zeros(4), group) * advantage).sum().item() == pytest.approx(
        0.0, abs=1e-12
    )
    assert (importance_ratio(logp, torch.zeros(4)) * advantage).sum().item() == pytest.approx(1.8)


def test_group_ratio_has_the_limits_of_the_others():
    group = torch.tensor([0, 0, 5])
    same = tensor([-1.0, -2.0, -3.0])
    assert segment_ratio(same, same, group).tolist() == [1.0, 1.0, 1.0]
    far = segment_ratio(tensor([50.0, 50.0, -50.0]), torch.zeros(3), group)
    assert far.tolist() == pytest.approx([math.exp(20), math.exp(20), math.exp(-20)])
    with pytest.raises(ValueError, match="one shape"):
        segment_ratio(torch.zeros(3), torch.zeros(1), group)


def test_chunk_ratio_by_hand():
    """Ratios 1.2, 0.9, 1.1: 1.188^(1/3) = 1.0591; and 1.01 · 0.98 · 1.03 = 1.019494, to first order 1.02."""
    row = torch.zeros(3, dtype=torch.int64)
    rho = level_ratio(tensor([1.2, 0.9, 1.1]).log(), torch.zeros(3), level="turn", sequence=row, turn=row)
    assert rho.tolist() == pytest.approx([1.0591] * 3, abs=5e-5)
    deltas = tensor([0.01, -0.02, 0.03])
    rho = level_ratio((1 + deltas).log(), torch.zeros(3), level="sequence", sequence=row, turn=row)
    assert (rho[0] ** 3).item() == pytest.approx(1.019494, abs=5e-7)
    assert (rho[0] ** 3).item() == pytest.approx(1 + deltas.sum().item(), abs=1e-3)


def test_levels_coincide_where_segments_do():
    a, b = tensor(RNG.normal(size=8)), tensor(RNG.normal(size=8))
    each, all_ = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    token = importance_ratio(a, b)
    assert_allclose(level_ratio(a, b, level="token", sequence=all_, turn=all_), token)
    assert_allclose(level_ratio(a, b, level="turn", sequence=all_, turn=each), token)
    assert_allclose(
        level_ratio(a, b, level="turn", sequence=each, turn=all_),
        level_ratio(a, b, level="sequence", sequence=all_, turn=each),
    )


def test_gradient_of_the_sequence_ratio_is_gspo():
    """GSPO, equation 10: s A (1/|y|) Σ ∇log π, the mean of s A ∇log π over tokens that share one s."""
    p, q = RNG.uniform(0.3, 0.5, 5), RNG.uniform(0.3, 0.5, 5)
    sequence = torch.tensor([0, 1, 0, 0, 1])
    advantage, length = tensor([0.5, -2.0, 0.5, 0.5, -2.0]), tensor([3.0, 2.0, 3.0, 3.0, 2.0])
    logp = tensor(np.log(p), grad=True)
    s = level_ratio(logp, tensor(np.log(q)), level="sequence", sequence=sequence, turn=sequence)
    (s * advantage / length).sum().backward()
    assert_allclose(logp.grad, (s * advantage / length).detach())


def test_interpolated_proximal_is_the_mean_of_policies_by_lag():
    """A-3PO by versions: sampled at 3, proximal 9, current 10; current share α = (9 - 3)/(10 - 3) = 6/7."""
    mu, pi = RNG.uniform(0.05, 0.9, 50), RNG.uniform(0.05, 0.9, 50)
    lag = RNG.integers(1, 9, 50)
    got = interpolated_proximal(tensor(np.log(mu)), tensor(np.log(pi)), torch.tensor(lag)).exp()
    for i in range(50):
        alpha = (lag[i] - 1) / lag[i]
        assert got[i].item() == pytest.approx(mu[i] ** (1 - alpha) * pi[i] ** alpha, rel=1e-12)
    at_seven = interpolated_proximal(tensor([0.0]), tensor([-7.0]), tensor([7.0]))
    assert at_seven.item() == pytest.approx(-6.0)


def test_interpolated_proximal_at_its_ends_is_exact():
    mu, pi = torch.randn(64), torch.randn(64, requires_grad=True)
    zeros, ones = torch.zeros(64), torch.ones(64)
    assert torch.equal(interpolated_proximal(mu, pi, zeros), pi)
    assert torch.equal(interpolated_proximal(mu, pi, zeros, fresh="behaviour"), mu)
    for fresh in ("current", "behaviour"):
        assert torch.equal(interpolated_proximal(mu, pi, ones, fresh=fresh), mu)
        assert not interpolated_proximal(mu, pi, ones, fresh=fresh).requires_grad
    ratio = importance_ratio(pi, interpolated_proximal(mu, pi, zeros))
    assert torch.equal(ratio, ones)
    ratio.sum().backward()
    assert torch.equal(pi.grad, ones)


def test_learning_rate_factor_by_hand():
    """A share of 9/25 gives 0.36 by the linear rule, and 0.6 by the square root."""
    assert learning_rate_factor(9 / 25) == pytest.approx(0.36)
    assert learning_rate_factor(9 / 25, rule="sqrt") == pytest.approx(0.6)
    assert learning_rate_factor(1 + 1e-7) == 1.0
    for share in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="effective sample share"):
            learning_rate_factor(share)


# --- corrections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [0.3, 1.0, 2.0])
def test_truncated_correction_equals_the_loop(ceiling):
    ratios, _ = draws()
    weight, cut = truncated_correction(tensor(ratios), ceiling=ceiling)
    assert_allclose(weight, [min(r, ceiling) for r in ratios])
    assert cut.tolist() == [r > ceiling for r in ratios]


@pytest.mark.parametrize("keep_weight", [True, False])
def test_interval_correction_equals_the_loop(keep_weight):
    """IcePop: M(k) = k inside [α, β], else 0."""
    ratios, _ = draws()
    weight, cut = interval_correction(tensor(ratios), low=0.5, high=2.0, keep_weight=keep_weight)
    for r, w, c in zip(ratios, weight.tolist(), cut.tolist(), strict=True):
        inside = 0.5 <= r <= 2.0
        assert w == ((r if keep_weight else 1.0) if inside else 0.0)
        assert c is not inside


def test_corrections_pass_no_gradient():
    ratio = tensor([0.5, 1.0, 4.0], grad=True)
    assert not truncated_correction(ratio, ceiling=2.0).weight.requires_grad
    assert not interval_correction(ratio, low=0.0, high=2.0, keep_weight=True).weight.requires_grad


def test_a_ratio_that_is_no_number_is_rejected():
    weight, cut = interval_correction(tensor([math.nan, 1.0]), low=0.5, high=2.0, keep_weight=True)
    assert weight.tolist() == [0.0, 1.0]
    assert cut.tolist() == [True, False]


def test_impossible_bounds_of_corrections_are_refused():
    for low, high in ((-0.1, 1.0), (2.0, 1.0)):
        with pytest.raises(ValueError, match="low <= high"):
            interval_correction(torch.ones(1), low=low, high=high, keep_weight=True)
    with pytest.raises(ValueError, match="ceiling"):
        truncated_correction(torch.ones(1), ceiling=0.0)


def hispo_mask(proximal, behaviour, delta_sequence, delta_token):
    """Return the product of both masks of one sequence, built from two corrections."""
    row = torch.zeros(len(proximal), dtype=torch.int64)
    mask = torch.ones(len(proximal), dtype=torch.float64)
    for level, delta in (("sequence", delta_sequence), ("token", delta_token)):
        ratio = level_ratio(
            tensor(proximal).log(), tensor(behaviour).log(), level=level, sequence=row, turn=row
        )
        mask = mask * interval_correction(ratio, low=1 - delta, high=1 + delta, keep_weight=False).weight
    return mask.tolist()


def test_hispo_mask_by_hand():
    """μ = 0.5 everywhere; π = 0.5, 0.55, 0.45, 0.9: token ratios 1, 1.1, 0.9, 1.8, geometric mean 1.15539.

    Proximal π = 0.8, 0.2, 0.5, 0.5 has the mean (1.6 · 0.4)^(1/4) = 0.8944: errors of opposite sign do not
    cancel.
    """
    behaviour, proximal = [0.5] * 4, [0.5, 0.55, 0.45, 0.9]
    row = torch.zeros(4, dtype=torch.int64)
    mean = level_ratio(
        tensor(proximal).log(), tensor(behaviour).log(), level="sequence", sequence=row, turn=row
    )
    assert mean[0].item() == pytest.approx(1.15539, abs=5e-6)
    assert hispo_mask(proximal, behaviour, 0.2, 0.5) == [1, 1, 1, 0]
    assert hispo_mask(proximal, behaviour, 0.1, 0.5) == [0, 0, 0, 0]
    assert hispo_mask([0.8, 0.2, 0.5, 0.5], behaviour, 0.05, 0.9) == [0, 0, 0, 0]
    assert hispo_mask(behaviour, behaviour, 0.02, 0.5) == [1, 1, 1, 1]


# --- clips ----------------------------------------------------------------------------------------------------


def dual_clip(r, a, low, high, ceiling):
    """Return arXiv:1912.09729's dual clip: m = min(r A, clip(r) A), and for A < 0 the larger of m and c A."""
    value = min(r * a, clip(r, 1 - low, 1 + high) * a)
    return max(value, ceiling * a) if a < 0 else value


@pytest.mark.parametrize("ceiling", [1.5, 3.0])
def test_dual_clip_equals_the_formula(ceiling):
    ratios, advantages = draws()
    expected = [dual_clip(r, a, 0.2, 0.28, ceiling) for r, a in zip(ratios, advantages, strict=True)]
    function = lambda r: dual_clipped_surrogate(  # noqa: E731
        r, tensor(advantages), low=0.2, high=0.28, ceiling=ceiling
    )
    check_ratio_surrogate(function, ratios, expected)
    counted = function(tensor(ratios)).clipped.numpy()
    assert (counted[advantages != 0] == (gradient(function, ratios) == 0)[advantages != 0]).all()
    assert not counted[advantages == 0].any()


@pytest.mark.parametrize("ceiling", [None, math.inf])
def test_without_a_ceiling_the_dual_clip_is_ppo(ceiling):
    ratios, advantages = draws()
    value, clipped = dual_clipped_surrogate(
        tensor(ratios), tensor(advantages), low=0.2, high=0.28, ceiling=ceiling
    )
    assert torch.equal(value, clipped_surrogate(tensor(ratios), tensor(advantages), low=0.2, high=0.28))
    assert torch.equal(clipped, clip_active(tensor(ratios), tensor(advantages), low=0.2, high=0.28))


def test_bounds_may_differ_from_token_to_token():
    ratios, advantages = draws()
    low, high = RNG.uniform(0, 0.6, N), RNG.uniform(0, 0.9, N)
    expected = [dual_clip(*row, 3.0) for row in zip(ratios, advantages, low, high, strict=True)]
    check_ratio_surrogate(
        lambda r: dual_clipped_surrogate(
            r, tensor(advantages), low=tensor(low), high=tensor(high), ceiling=3.0
        ),
        ratios,
        expected,
    )


def test_gradient_on_the_bounds_is_whole():
    """At r = 1 - ε and r = 1 + ε, nothing is clipped yet."""
    ratios, advantages = np.array([0.75, 0.75, 1.25, 1.25]), np.array([1.0, -1.0, 1.0, -1.0])
    function = lambda r: dual_clipped_surrogate(r, tensor(advantages), low=0.25, high=0.25)  # noqa: E731
    assert gradient(function, ratios).tolist() == advantages.tolist()


def test_reciprocal_clip_range_of_loop():
    """ε = 0.1: [1/1.1, 1.1] = [0.90909, 1.1]. Below, A = -1 stays at -0.90909; above, A = 1 at 1.1."""
    epsilon = 0.1
    ratios, advantages = tensor([0.9, 0.9, 0.91, 1.11, 1.09]), tensor([-1.0, 1.0, -1.0, 1.0, 1.0])
    value, clipped = dual_clipped_surrogate(ratios, advantages, low=1 - 1 / (1 + epsilon), high=epsilon)
    assert value.tolist() == pytest.approx([-1 / 1.1, 0.9, -0.91, 1.1, 1.09])
    assert clipped.tolist() == [True, False, False, True, False]
    for r, a in zip(*draws(), strict=True):
        got = dual_clipped_surrogate(tensor([r]), tensor([a]), low=1 - 1 / (1 + epsilon), high=epsilon).value
        # The paper's g(A) = A + ε|A| bounds a positive advantage's gain; the lower end is the reciprocal.
        assert got.item() == pytest.approx(min(r * a, a + epsilon * abs(a)) if a > 0 else a * max(r, 1 / 1.1))


def test_a_ceiling_that_cuts_fresh_tokens_is_refused():
    for ceiling in (1.0, 0.0, math.nan):
        with pytest.raises(ValueError, match="ceiling"):
            dual_clipped_surrogate(torch.ones(1), torch.ones(1), low=0.2, high=0.2, ceiling=ceiling)


def test_window_clip_equals_the_formula():
    ratios, advantages = draws()
    centres = RNG.lognormal(0, 0.8, N)
    expected = [
        min(r * a, clip(r, max(0.0, c - 0.2), c + 0.2) * a)
        for r, c, a in zip(ratios, centres, advantages, strict=True)
    ]
    check_ratio_surrogate(
        lambda r: window_clipped_surrogate(r, tensor(centres), tensor(advantages), epsilon=0.2),
        ratios,
        expected,
    )


def test_window_at_lag_zero_is_ppo():
    """Centre 1 equals the clip around 1 in every bit."""
    ratios, advantages = (tensor(x) for x in draws())
    got = window_clipped_surrogate(ratios, torch.ones_like(ratios), advantages, epsilon=0.25)
    expected = dual_clipped_surrogate(ratios, advantages, low=0.25, high=0.25)
    assert torch.equal(got.value, expected.value)
    assert torch.equal(got.clipped, expected.clipped)


def test_window_clips_nothing_while_the_policy_has_not_moved():
    """Current = proximal gives r = c, and the gradient is c A ∇log π.

    It is 1.8 at c = 1.8 and A = 1; the gradient of PPO around 1 is 0 there.
    """
    logp, advantages = RNG.normal(size=N), RNG.normal(size=N)
    current = tensor(logp, grad=True)
    centre = importance_ratio(tensor(logp), torch.zeros(N))
    value, clipped = window_clipped_surrogate(
        importance_ratio(current, torch.zeros(N)), centre, tensor(advantages), epsilon=0.2
    )
    value.sum().backward()
    assert not clipped.any()
    assert_allclose(current.grad, centre * tensor(advantages))

    for function, expected in (
        (lambda r: window_clipped_surrogate(r, tensor([1.8]), tensor([1.0]), epsilon=0.2), 1.8),
        (lambda r: dual_clipped_surrogate(r, tensor([1.0]), low=0.2, high=0.2), 0.0),
    ):
        logp = tensor([math.log(1.8)], grad=True)
        function(importance_ratio(logp, torch.zeros(1))).value.sum().backward()
        assert logp.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("centre", "window", "decoupled"), [(1.8, (1.6, 2.0), (1.44, 2.16)), (0.5, (0.3, 0.7), (0.4, 0.6))]
)
def test_window_and_decoupled_clip_differ_in_width(centre, window, decoupled):
    """ε = 0.2: [c - ε, c + ε] against [c(1 - ε), c(1 + ε)]. r near 0 and r = 9 are clipped to the ends."""
    far, advantages = tensor([1e-9, 9.0]), tensor([-1.0, 1.0])
    value = window_clipped_surrogate(far, tensor([centre] * 2), advantages, epsilon=0.2).value
    assert (value * advantages).tolist() == pytest.approx(window)
    value = centre * dual_clipped_surrogate(far / centre, advantages, low=0.2, high=0.2).value
    assert (value * advantages).tolist() == pytest.approx(decoupled)


def test_window_below_its_half_width_never_cuts_negative_tokens():
    """c = 0.1 < ε = 0.2: the lower end is 0, which no ratio falls below."""
    function = lambda r: window_clipped_surrogate(r, tensor([0.1]), tensor([-1.0]), epsilon=0.2)  # noqa: E731
    assert gradient(function, [1e-9]).item() == -1.0
    assert not function(tensor([1e-9])).clipped.any()


def test_triplet_clip_equals_the_cases():
    ratios, advantages = draws()
    expected = [
        a * (min(r, 1.28) if a > 0 else clip(r, 0.8, 5.0)) for r, a in zip(ratios, advantages, strict=True)
    ]
    check_ratio_surrogate(
        lambda r: triplet_clipped_surrogate(
            r, tensor(advantages), negative_low=0.8, negative_high=5.0, positive_high=1.28
        ),
        ratios,
        expected,
    )


def test_triplet_is_the_dual_clip_with_names_of_its_own():
    ratios, advantages = (tensor(x) for x in draws())
    got = triplet_clipped_surrogate(
        ratios, advantages, negative_low=0.75, negative_high=5.0, positive_high=1.25
    )
    expected = dual_clipped_surrogate(ratios, advantages, low=0.25, high=0.25, ceiling=5.0)
    assert torch.equal(got.value, expected.value)
    assert torch.equal(got.clipped, expected.clipped)
    with pytest.raises(ValueError, match="negative_low"):
        triplet_clipped_surrogate(ratios, advantages, negative_low=2.0, negative_high=1.0, positive_high=1.0)


# --- weighted log-likelihood ----------------------------------------------------------------------------------


def loss_gradient(function, n):
    logp = torch.full((n,), -1.0, dtype=torch.float64, requires_grad=True)
    got = function(logp)
    (-got.value.sum()).backward()
    return logp.grad.tolist(), got.clipped.tolist()


def test_weighted_surrogate_equals_the_formula():
    """CISPO, equations 4 and 5: the gradient is clip(r) A, and every token has one."""
    ratios, advantages = draws()
    for low, high in ((0.0, 2.0), (0.8, 1.28)):
        grads, clipped = loss_gradient(
            lambda lp, low=low, high=high: weighted_surrogate(
                lp, tensor(ratios), tensor(advantages), low=low, high=high
            ),
            N,
        )
        expected = [-clip(r, low, high) * a for r, a in zip(ratios, advantages, strict=True)]
        assert_allclose(grads, expected, rtol=1e-12, atol=1e-15)
        assert not any(clipped)
    with pytest.raises(ValueError, match="low <= high"):
        weighted_surrogate(torch.ones(1), torch.ones(1), torch.ones(1), low=3.0, high=2.0)


def test_weights_pass_no_gradient_where_the_ratio_has_one():
    """Both tokens have ratio e^-0.5, returns 1 and -2: the gradient is weight times return, and no more."""
    weight = math.exp(-0.5)
    for build, expected in (
        (lambda lp, r, a: weighted_surrogate(lp, r, a, high=5.0), [weight, -2 * weight]),
        (lambda lp, r, a: minirl_surrogate(lp, r, r, a, low=0.9, high=9, ceiling=5.0), [weight, -2 * weight]),
        (lambda lp, r, a: chunk_surrogate(lp, r, a), [1.0, -2 * weight]),
    ):
        logp = tensor([-1.0, -1.0], grad=True)
        ratio = importance_ratio(logp, tensor([-0.5, -0.5]))
        build(logp, ratio, tensor([1.0, -2.0])).value.sum().backward()
        assert_allclose(logp.grad, expected)


MINIRL = {
    "behaviour": [0.5, 0.2, 0.4, 0.1],
    "proximal": [0.5, 0.25, 0.4, 0.6],
    "current": [0.7, 0.3, 0.3, 0.6],
}


@pytest.mark.parametrize(
    ("advantage", "masked", "expected"),
    [
        (1.0, [True, False, False, False], [0, -1.5, -0.75, -5]),
        (-1.0, [False, False, True, False], [1.4, 1.5, 0, 5]),
    ],
)
def test_minirl_by_hand(advantage, masked, expected):
    """π/π_prox = 1.4, 1.2, 0.75, 1 against [0.8, 1.27]; π/μ = 1.4, 1.5, 0.75, 6, the last capped at 5."""
    policy = {name: tensor(p).log() for name, p in MINIRL.items()}
    s = importance_ratio(policy["current"], policy["proximal"])
    w = importance_ratio(policy["current"], policy["behaviour"])
    assert s.tolist() == pytest.approx([1.4, 1.2, 0.75, 1.0])
    assert w.tolist() == pytest.approx([1.4, 1.5, 0.75, 6.0])
    a = torch.full((4,), advantage, dtype=torch.float64)
    grads, clipped = loss_gradient(
        lambda lp: minirl_surrogate(lp, s, w, a, low=0.2, high=0.27, ceiling=5.0), 4
    )
    assert grads == pytest.approx(expected)
    assert clipped == masked
    with pytest.raises(ValueError, match="ceiling"):
        minirl_surrogate(s, s, w, a, low=0.2, high=0.27, ceiling=0.0)


def test_minirl_without_mismatch_is_ppo():
    """Behaviour = proximal: the weight is the masked ratio, and the gradient equals the clip's."""
    behaviour, advantages = tensor(np.zeros(N)), tensor(RNG.normal(size=N))
    grads = []
    for surrogate in (
        lambda lp, r: minirl_surrogate(lp, r, r, advantages, low=0.2, high=0.27, ceiling=1e9),
        lambda lp, r: dual_clipped_surrogate(r, advantages, low=0.2, high=0.27),
    ):
        logp = torch.linspace(-1, 1, N, dtype=torch.float64).requires_grad_()
        surrogate(logp, importance_ratio(logp, behaviour)).value.sum().backward()
        grads.append(logp.grad)
    assert_allclose(grads[0], grads[1], rtol=1e-12)


def test_chunk_surrogate_equals_the_cases():
    """IPA: G where it is positive, min(ρ, 1) G where it is negative."""
    ratios, returns = draws()
    grads, clipped = loss_gradient(lambda lp: chunk_surrogate(lp, tensor(ratios), tensor(returns)), N)
    assert_allclose(grads, [-g if g > 0 else -min(r, 1.0) * g for r, g in zip(ratios, returns, strict=True)])
    assert not any(clipped)


def test_chunk_surrogate_on_policy_is_reinforce_with_the_chunks_return():
    """γ = 0.9, three chunks, return 1: 0.81, 0.9, 1."""
    returns = tensor([0.81, 0.9, 0.9, 1.0])
    for sign in (1, -1):
        grads, _ = loss_gradient(
            lambda lp, sign=sign: chunk_surrogate(lp, lp.detach() * 0 + 1, sign * returns), 4
        )
        assert grads == pytest.approx((-sign * returns).tolist())


def test_a_masked_chunk_leaves_its_neighbours_alone():
    turn = torch.tensor([0, 0, 1, 1, 2])
    proximal, behaviour = tensor([0.5, 0.5, 0.9, 0.9, 0.5]).log(), tensor([0.5, 0.4, 0.1, 0.2, 0.6]).log()
    rho = level_ratio(proximal, behaviour, level="turn", sequence=turn * 0, turn=turn)
    mask = interval_correction(rho, low=0.0, high=2.0, keep_weight=False).weight
    assert mask.tolist() == [1, 1, 0, 0, 1]
    logp = tensor([-1.0] * 5, grad=True)
    (mask * chunk_surrogate(logp, torch.ones(5), tensor([2.0, 2.0, 3.0, 3.0, -1.0])).value).sum().backward()
    assert logp.grad.tolist() == [2, 2, 0, 0, -1]


# --- penalties ------------------------------------------------------------------------------------------------


def by_logp(function, ratio):
    """Return the gradient with respect to the log-probability, at a ratio."""
    logp = tensor([math.log(ratio)], grad=True)
    function(importance_ratio(logp, tensor([0.0]))).value.sum().backward()
    return logp.grad.item()


def test_ratio_variance_equals_the_formula():
    ratios, advantages = draws()
    for dual in (0.0, 0.5, 3.0):
        check_ratio_surrogate(
            lambda r, dual=dual: ratio_variance_surrogate(r, tensor(advantages), dual=dual),
            ratios,
            [r * a - dual * (r - 1) ** 2 for r, a in zip(ratios, advantages, strict=True)],
        )


@pytest.mark.parametrize(
    ("advantage", "dual", "ratio", "weight"),
    [
        (1.0, 1.0, 1.5, 0.0),
        (1.0, 1.0, 2.0, -2.0),
        (-1.0, 1.0, 0.5, 0.0),
        (1.0, 0.0, 2.0, 2.0),
        (3.0, 7.0, 1.0, 3.0),
    ],
)
def test_ratio_variance_gradient_by_hand(advantage, dual, ratio, weight):
    """r (A - 2λ(r - 1)): 1.5 (1 - 1) = 0, 2 (1 - 2) = -2, 0.5 (-1 + 1) = 0; λ = 0 and r = 1 leave r A."""
    got = by_logp(lambda r: ratio_variance_surrogate(r, tensor([advantage]), dual=dual), ratio)
    assert got == pytest.approx(weight, abs=1e-12)


def test_dual_variable_by_hand():
    """1 + 2 (0.25 - 0.125) = 1.25; 0.1 + 1 (0 - 0.5) < 0 becomes 0."""
    assert next_dual(1.0, 0.25, bound=0.125, rate=2.0) == 1.25
    assert next_dual(0.1, 0.0, bound=0.5, rate=1.0) == 0.0
    assert next_dual(1.0, 1e12, bound=0.1, rate=1.0, ceiling=100.0) == 100.0
    with pytest.raises(ValueError, match="skip this step"):
        next_dual(1.0, math.nan, bound=0.1, rate=1.0)


def test_dual_ascent_holds_the_ratio_at_its_bound():
    """A token with A = 1 rests at r = 1 + 1/2λ, so a mean square of δ = 0.04 needs λ = 1/0.4 = 2.5."""
    dual = 1.0
    for _ in range(2000):
        resting = 1 + 1 / (2 * max(dual, 1e-3))
        dual = next_dual(dual, (resting - 1) ** 2, bound=0.04, rate=1.0)
    assert dual == pytest.approx(2.5, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "temperature", "scores", "targets"),
    [
        ([0, 0, 0, 1], 1e-4, [-0.5, -0.5, -0.5, 1.5], [1, 1, 1, 1.3]),
        ([0, 0, 1, 1], 1e-4, [-0.8660254, -0.8660254, 0.8660254, 0.8660254], [0.7, 0.7, 1.3, 1.3]),
        ([0, 0, 0, 1], 1.0, [-0.5, -0.5, -0.5, 1.5], [1, 1, 1, 1.228478]),
    ],
)
def test_group_targets_by_hand(rewards, temperature, scores, targets):
    """Standard deviation with ddof 1: 0.5 and 0.57735. 0.7 + 0.6 σ(2) = 0.7 + 0.6 · 0.880797 = 1.228478."""
    r = np.array(rewards, dtype=float)
    scale = r.std(ddof=1) + 1e-6
    assert_allclose((r - r.mean()) / scale, scores, atol=1e-5)
    got = bounded_target(tensor((r - np.median(r)) / scale), low=0.3, high=0.3, temperature=temperature)
    assert_allclose(got, targets, atol=1e-6)


def test_bounded_surrogate_equals_the_loop_and_leads_back():
    """The slope is -|A| sign(r - target) on both sides of the target, even outside the bounds of PPO."""
    ratios, advantages = draws()
    targets = np.where(advantages > 0, 1.3, 0.7)
    function = lambda r: bounded_surrogate(r, tensor(targets), tensor(np.abs(advantages)))  # noqa: E731
    expected = [-abs(r - t) * abs(a) for r, t, a in zip(ratios, targets, advantages, strict=True)]
    check_ratio_surrogate(function, ratios, expected)
    assert_allclose(gradient(function, ratios), -np.sign(ratios - targets) * np.abs(advantages))
    inside = (ratios > 0.7) & (ratios < 1.3)
    ppo = gradient(lambda r: dual_clipped_surrogate(r, tensor(advantages), low=0.3, high=0.3), ratios)
    assert_allclose(gradient(function, ratios)[inside], ppo[inside])
    at_target = gradient(function, targets)
    assert (at_target == 0).all()
    assert (function(tensor(targets)).value == 0).all()


def test_targets_of_unequal_half_widths_by_hand():
    """ε = 0.2 below and 0.4 above: 0.8, 1.4, and 1.1 half way, at the median. σ(log 3) = 3/4: 1.25."""
    got = bounded_target(tensor([-1.0, 0.0, 1.0]), low=0.2, high=0.4, temperature=1e-4)
    assert_allclose(got, [0.8, 1.1, 1.4])
    got = bounded_target(tensor([math.log(3)]), low=0.2, high=0.4, temperature=1.0)
    assert_allclose(got, [1.25])


def test_targets_ask_for_a_temperature():
    with pytest.raises(ValueError, match="temperature"):
        bounded_target(torch.zeros(1), low=0.3, high=0.3, temperature=0.0)


def test_bounded_targets_keep_a_policy_normalised():
    """π_0 (1 + ε sign(Q - med)) sums to 1 if half of the probability lies on each side of the median.

    It gains ε E|Q - med|: 0.3 (0.5 · 1 + 0.5 · 3) = 0.6.
    """
    policy, q, median = np.array([0.2, 0.3, 0.1, 0.4]), np.array([-1.0, -1.0, 3.0, 3.0]), 0.0
    target = bounded_target(tensor(q - median), low=0.3, high=0.3, temperature=1e-4).numpy()
    assert (policy * target).sum() == pytest.approx(1.0)
    assert (policy * target * q).sum() - (policy * q).sum() == pytest.approx(0.6)


def test_mirror_descent_equals_the_formula():
    ratios, advantages = draws()
    for step in (1.0, 0.1):
        check_ratio_surrogate(
            lambda r, step=step: mirror_descent_surrogate(r, tensor(advantages), step_size=step),
            ratios,
            [r * a - (r * math.log(r) - r + 1) / step for r, a in zip(ratios, advantages, strict=True)],
        )
    with pytest.raises(ValueError, match="step size"):
        mirror_descent_surrogate(torch.ones(1), torch.ones(1), step_size=0.0)


def test_mirror_descent_penalty_has_the_kl_as_its_mean():
    """Σ q (r log r - r + 1) with r = p/q is KL(p || q), over all tokens of a vocabulary."""
    p, q = RNG.dirichlet(np.ones(20)), RNG.dirichlet(np.ones(20))
    value = mirror_descent_surrogate(tensor(p / q), torch.zeros(20), step_size=0.25).value
    kl = sum(p[i] * math.log(p[i] / q[i]) for i in range(20))
    assert (tensor(q) * value).sum().item() == pytest.approx(-kl / 0.25, rel=1e-10)


def test_mirror_descent_solves_the_bandit():
    """Ascent on the surrogate, over all arms in proportion to the proximal policy, leads to the closed form.

    Proximal (0.5, 0.3, 0.2), advantages 1, 0, -1, t = 1: π ∝ 0.5 e, 0.3, 0.2/e, which is 0.78440, 0.17314,
    0.04246.
    """
    proximal, advantages = np.array([0.5, 0.3, 0.2]), np.array([1.0, 0.0, -1.0])
    closed = proximal * np.exp(advantages) / (proximal * np.exp(advantages)).sum()
    assert_allclose(closed, [0.78440, 0.17314, 0.04246], atol=5e-6)
    logits = tensor(np.log(proximal), grad=True)
    optimizer = torch.optim.SGD([logits], lr=2.0, maximize=True)
    for step in range(500):
        optimizer.zero_grad()
        ratio = importance_ratio(logits.log_softmax(0), tensor(proximal).log())
        value = mirror_descent_surrogate(ratio, tensor(advantages), step_size=1.0).value
        (tensor(proximal) * value).sum().backward()
        # The first step has no KL gradient, so it is REINFORCE.
        if step == 0:
            mean = (proximal * advantages).sum()
            assert_allclose(logits.grad, proximal * (advantages - mean), atol=1e-14)
        optimizer.step()
    assert_allclose(logits.softmax(0).detach(), closed, atol=1e-9)


def test_mirror_step_sizes_by_hand():
    """t_k = 1 - (k - 1)/K with K = 4: 1, 3/4, 1/2, 1/4, and then constant."""
    assert [mirror_step_size(k, 4) for k in range(1, 7)] == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]
    for k, total in ((0, 4), (1, 0)):
        with pytest.raises(ValueError, match="count from 1"):
            mirror_step_size(k, total)


# --- all surrogates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "surrogate",
    [
        lambda lp, r, a: dual_clipped_surrogate(r, a, low=0.2, high=0.28, ceiling=3.0),
        lambda lp, r, a: window_clipped_surrogate(r, r.detach(), a, epsilon=0.2),
        lambda lp, r, a: triplet_clipped_surrogate(
            r, a, negative_low=0.8, negative_high=5.0, positive_high=1.28
        ),
        lambda lp, r, a: weighted_surrogate(lp, r, a, high=2.0),
        lambda lp, r, a: minirl_surrogate(lp, r, r, a, low=0.2, high=0.27, ceiling=5.0),
        lambda lp, r, a: chunk_surrogate(lp, r, a),
        lambda lp, r, a: ratio_variance_surrogate(r, a, dual=2.0),
        lambda lp, r, a: mirror_descent_surrogate(r, a, step_size=0.5),
        lambda lp, r, a: bounded_surrogate(
            r, bounded_target(a, low=0.3, high=0.3, temperature=1e-4), a.abs()
        ),
    ],
)
def test_on_policy_every_surrogate_is_reinforce(surrogate):
    """All policies equal: the gradient with respect to the log-probability is the advantage."""
    advantages = tensor(RNG.normal(size=N))
    logp = tensor(RNG.normal(-1.0, 0.5, N), grad=True)
    value, clipped = surrogate(logp, importance_ratio(logp, logp.detach()), advantages)
    value.sum().backward()
    assert_allclose(logp.grad, advantages, rtol=1e-12)
    assert not clipped.any()
