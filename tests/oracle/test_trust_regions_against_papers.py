"""Test trust regions, kernels and baselines for stale tokens against slow numpy twins and hand-worked numbers.

M2PO (arXiv:2510.01161), DPPO (2602.04879), TRM (2512.23075), FlashREINFORCE (NVIDIA 2026), SAO (2607.07508),
SAT (2607.18722), DRPO (2606.09821), VESPO (2602.10693), VCPO (2602.17616), TBA (2503.18929), GAC (2603.01501).
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.algorithms.baselines import balance_excess, optimal_baseline, score_square
from learner.algorithms.surrogates import clip_active, weighted_surrogate
from learner.algorithms.trust_regions import (
    divergence,
    divergence_correction,
    gamma_kernel,
    moves_away,
    over_segment,
    quadratic_pull_surrogate,
    second_moment_cap,
    second_moment_cut,
    segment_max,
    tail_bounds,
    trust_region_surrogate,
)
from learner.settings.algorithm import AlgorithmConfig
from learner.update.alignment import GradientAlignment
from learner.update.objective import Adaptive, Tokens, make_objective

RNG = np.random.default_rng(37)
STATISTICS = ("ratio", "log_square", "binary_tv", "binary_kl")


def doubles(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def policies(n):
    """Return log-probabilities of a current and a behaviour policy, and advantages of both signs."""
    behaviour = np.log(RNG.uniform(0.01, 0.99, n))
    return np.minimum(behaviour + RNG.normal(size=n), -1e-3), behaviour, RNG.normal(size=n)


def slow_divergence(logp, logp_behaviour, statistic):
    """Return the distance of each token, from probabilities alone."""
    found = []
    for current, behaviour in zip(np.exp(logp), np.exp(logp_behaviour), strict=True):
        match statistic:
            case "ratio":
                found.append(abs(current / behaviour - 1))
            case "log_square":
                found.append(math.log(current / behaviour) ** 2)
            case "binary_tv":
                # Half of the sum over both points: the token and all others.
                found.append((abs(current - behaviour) + abs((1 - current) - (1 - behaviour))) / 2)
            case _:
                two = ((behaviour, current), (1 - behaviour, 1 - current))
                found.append(sum(p * math.log(p / q) for p, q in two))
    return np.array(found)


# --- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics(statistic):
    logp, behaviour, _ = policies(40)
    found = divergence(doubles(logp), doubles(behaviour), statistic=statistic)
    np.testing.assert_allclose(found, slow_divergence(logp, behaviour, statistic), rtol=1e-9)
    assert divergence(doubles(behaviour), doubles(behaviour), statistic=statistic).abs().max() == 0


def test_statistics_by_hand():
    """From .5 to .75: r 1.5, log 1.5 = .405465, shift .25, KL .5 log(.5/.75) + .5 log(.5/.25) = .143841."""
    a, b = torch.tensor([0.75]).log(), torch.tensor([0.5]).log()
    found = [float(divergence(a, b, statistic=s)) for s in STATISTICS]
    assert found == pytest.approx([0.5, 0.164402, 0.25, 0.143841], abs=1e-5)


def test_a_rare_token_may_double_and_a_likely_one_may_not():
    """The paper's point: both have the ratio 1.5 or more, and the shift tells them apart."""
    current, behaviour = torch.tensor([0.002, 0.9]).log(), torch.tensor([0.001, 0.6]).log()
    ratio, advantage = (current - behaviour).exp(), torch.ones(2)
    shift = divergence(current, behaviour, statistic="binary_tv")
    assert trust_region_surrogate(ratio, advantage, shift, bound=0.2).clipped.tolist() == [False, True]
    assert clip_active(ratio, advantage, low=0.2, high=0.2).tolist() == [True, True]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_dppo(statistic):
    logp, behaviour, advantages = policies(60)
    current = doubles(logp).requires_grad_()
    distance = divergence(current, doubles(behaviour), statistic=statistic)
    bound = float(distance.median())
    value, masked = trust_region_surrogate(
        (current - doubles(behaviour)).exp(), doubles(advantages), distance, bound=bound
    )
    (gradient,) = torch.autograd.grad(value.sum(), current)
    slow = slow_divergence(logp, behaviour, statistic)
    for t, (c, m, a) in enumerate(zip(logp, behaviour, advantages, strict=True)):
        ratio = math.exp(c - m)
        away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
        out = away and slow[t] > bound + 1e-12
        assert bool(masked[t]) == out
        assert float(gradient[t]) == pytest.approx(0 if out else ratio * a, rel=1e-9)
    assert 0 < masked.sum() < len(masked)


def test_the_ratio_as_statistic_is_the_clip_of_ppo():
    logp, behaviour, advantages = policies(80)
    ratio = doubles(logp - behaviour).exp()
    masked = trust_region_surrogate(ratio, doubles(advantages), (ratio - 1).abs(), bound=0.2).clipped
    assert torch.equal(masked, clip_active(ratio, doubles(advantages), low=0.2, high=0.2))


# --- whole rollouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["mean", "max"])
def test_rollouts_are_kept_or_left_out_as_a_whole(over):
    """TRM takes the largest token of a rollout, FlashREINFORCE the mean over its tokens."""
    logp, behaviour, _ = policies(30)
    row = RNG.integers(0, 6, 30)
    distance = divergence(doubles(logp), doubles(behaviour), statistic="binary_kl")
    ratio = doubles(logp - behaviour).exp()
    whole = over_segment(distance, torch.from_numpy(row), over=over)
    slow, bound = slow_divergence(logp, behaviour, "binary_kl"), float(whole.median())
    weight, cut = divergence_correction(whole, ratio, bound=bound)
    for t in range(30):
        own = slow[row == row[t]]
        out = (own.mean() if over == "mean" else own.max()) > bound + 1e-12
        assert bool(cut[t]) == out
        assert float(weight[t]) == pytest.approx(0 if out else math.exp(logp[t] - behaviour[t]))
    assert 0 < cut.sum() < 30


def test_the_largest_of_a_segment():
    values, row = RNG.normal(size=50), RNG.integers(0, 9, 50)
    expected = [max(values[row == r]) for r in row]
    assert segment_max(doubles(values), torch.from_numpy(row)).tolist() == expected
    with pytest.raises(ValueError, match="id of its segment"):
        segment_max(torch.ones(2), torch.zeros(3, dtype=torch.int64))


def test_what_is_not_a_number_is_left_out():
    weight, cut = divergence_correction(torch.tensor([math.nan]), torch.ones(1), bound=9.0)
    assert (float(weight), bool(cut)) == (0.0, True)


# --- M2PO -----------------------------------------------------------------------------------------------------


def slow_cut(values, budget):
    """Mask the largest, all of equal size at once, until the mean of the rest is within the budget."""
    kept = sorted(values)
    while kept and sum(kept) / len(kept) > budget:
        kept = [v for v in kept if v < kept[-1]]
    return kept


@pytest.mark.parametrize("seed", range(20))
def test_m2po_masks_the_largest_until_the_budget_holds(seed):
    rng = np.random.default_rng(seed)
    values = np.round(rng.exponential(0.1, rng.integers(1, 30)), 2)
    cut = second_moment_cut(doubles(values), budget=0.04)
    kept = sorted(v for v in values if v <= cut)
    assert kept == pytest.approx(slow_cut(values, 0.04))
    assert cut > 0
    assert not kept or np.mean(kept) <= 0.04 + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_m2po_caps_at_the_budget(seed):
    rng = np.random.default_rng(seed)
    values = rng.exponential(0.1, rng.integers(1, 30))
    cap = second_moment_cap(doubles(values), budget=0.04)
    if values.mean() <= 0.04:
        assert cap == math.inf
    else:
        assert np.minimum(values, cap**2).mean() == pytest.approx(0.04, rel=1e-9)


def test_m2po_by_hand():
    """Of .09, .04, .01 the mean is .0467: the mask keeps .04 and .01, with a bound halfway to .09. The cap c has
    (.01 + .04 + c) / 3 = .04."""
    values = doubles([0.09, 0.01, 0.04])
    assert second_moment_cut(values, budget=0.04) == pytest.approx(0.065)
    assert second_moment_cap(values, budget=0.04) ** 2 == pytest.approx(0.07)
    assert second_moment_cut(doubles([0.09]), budget=0.04) == pytest.approx(0.045), "nothing may move away"
    tied = second_moment_cut(doubles([0.09, 0.09, 0.001]), budget=0.04)
    assert tied == pytest.approx(0.0455), "ties go together"
    assert second_moment_cut(doubles([]), budget=0.04) == math.inf


# --- SAO, SAT, DRPO, VESPO ------------------------------------------------------------------------------------


def test_sao_rejects_on_both_sides_whatever_the_advantage():
    ratio = torch.tensor([0.69, 0.71, 5.9, 6.1, 0.5])
    logp = torch.full((5,), -1.0, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 2.0, -1.0, -1.0])
    value, out = weighted_surrogate(logp, ratio, advantage, low=0.7, high=6.0, reject=True)
    assert out.tolist() == [True, False, False, True, True]
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert gradient.tolist() == pytest.approx([0.0, -0.71, 11.8, 0.0, 0.0])


def test_sat_contracts_the_side_to_which_a_token_has_moved():
    """At |d| = 2 q the kernel is 1 / (1 + 4) = .2; up to q nothing is contracted."""
    moved = doubles([0.6, -0.6, 0.3, -0.2, 0.0])
    low, high = tail_bounds(moved, threshold=0.3, low=0.2, high=0.3, power=2.0)
    assert low.tolist() == pytest.approx([0.2, 0.04, 0.2, 0.2, 0.2])
    assert high.tolist() == pytest.approx([0.06, 0.3, 0.3, 0.3, 0.3])
    assert tail_bounds(moved, threshold=0.0, low=0.2, high=0.3, power=2.0)[0].tolist() == [0.2] * 5


def test_drpo():
    logp, behaviour, advantages = policies(60)
    current = doubles(logp).requires_grad_()
    ratio = (current - doubles(behaviour)).exp()
    value = quadratic_pull_surrogate(ratio, doubles(advantages), doubles(behaviour), bound=0.2).value
    (gradient,) = torch.autograd.grad(value.sum(), current)
    for t, (c, m, a) in enumerate(zip(logp, behaviour, advantages, strict=True)):
        ratio, shift = math.exp(c - m), abs(math.exp(c) - math.exp(m))
        expected = a * ratio * (1 - np.sign(a * (ratio - 1)) * shift / 0.2)
        assert float(gradient[t]) == pytest.approx(expected, rel=1e-8, abs=1e-12)


def test_vespo():
    weights, advantages = RNG.lognormal(size=40), RNG.normal(size=40)
    found = gamma_kernel(doubles(weights), doubles(advantages), positive=(2.0, 3.0), negative=(3.0, 2.0))
    for w, a, phi in zip(weights, advantages, found, strict=True):
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        assert float(phi) == pytest.approx(w**k * math.exp(-rate * w) / math.exp(-rate))
    one = gamma_kernel(torch.ones(2), torch.tensor([1.0, -1.0]), positive=(2.0, 3.0), negative=(3.0, 2.0))
    assert one.tolist() == [1.0, 1.0]


def test_vespos_weight_is_the_product_over_the_rollout():
    """Two tokens of ratio 2 and 1/2 have the product 1, so the kernel leaves both alone."""
    settings = {"surrogate": {"kind": "gamma"}, "corrections": []}
    gradient = gradient_of(
        settings, current=np.log([0.4, 0.2]), behaviour=np.log([0.2, 0.4]), advantage=[1.0, 1.0]
    )
    assert gradient == pytest.approx([-1.0, -1.0], rel=1e-5)


def gradient_of(settings, *, current, behaviour, advantage, adaptive=None, **more):
    """Return the gradient of the loss with respect to the log-probabilities, for tokens of one rollout."""
    logp = torch.tensor(np.asarray(current), dtype=torch.float32, requires_grad=True)
    n, row = len(current), torch.zeros(len(current), dtype=torch.int64)
    tokens = Tokens(
        torch.tensor(np.asarray(behaviour), dtype=torch.float32), torch.tensor(advantage), torch.ones(n),
        torch.zeros(n), row, row,
    )  # fmt: skip
    loss, _ = make_objective(AlgorithmConfig.model_validate(settings))(
        replace(tokens, **more), adaptive or Adaptive(), logp, torch.zeros(n)
    )
    return torch.autograd.grad(loss, logp)[0].tolist()


# --- VCPO, TBA, GAC -------------------------------------------------------------------------------------------


def test_vcpos_baseline_has_the_least_variance():
    """For gradients w (R - b) s with E s = 0, the mean square over a group is least at b*; (2·1 + 8·0) / 10 = .2."""
    rewards, weights, squares = RNG.normal(size=8), RNG.lognormal(size=8), RNG.uniform(0.1, 2, 8)
    (best, *_) = optimal_baseline(rewards, weights, squares, [0] * 8)
    power = lambda b: np.sum(weights**2 * squares * (rewards - b) ** 2)  # noqa: E731
    assert all(power(best) <= power(best + step) for step in (-0.1, -1e-3, 1e-3, 0.1))
    assert optimal_baseline([1.0, 0.0], [1.0, 2.0], [2.0, 2.0], [0, 0]).tolist() == pytest.approx([0.2, 0.2])


def test_a_shift_and_a_scale_of_returns_change_the_baseline_alike():
    rewards, weights, squares = RNG.normal(size=9), RNG.lognormal(size=9), RNG.uniform(0.1, 2, 9)
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    plain = optimal_baseline(rewards, weights, squares, groups)
    np.testing.assert_allclose(optimal_baseline(3 * rewards - 2, weights, squares, groups), 3 * plain - 2)


def test_the_probability_of_a_token_bounds_the_norm_of_its_score():
    for _ in range(50):
        p = RNG.dirichlet(np.full(5, 0.5))
        score = -p
        score[0] += 1
        (least,) = score_square([p[0]])
        assert least - 1e-12 <= score @ score <= 2 * least + 1e-12


def test_trajectory_balance_has_the_gradient_of_its_squared_residual():
    """The released program's loss, divided by 2 / β, for a group of three answers with log Z held constant."""
    beta, returns = 0.5, np.array([1.0, 0.0, 0.25])
    logp, reference = RNG.normal(size=(3, 4)) - 2, RNG.normal(size=(3, 4)) - 2
    current = doubles(logp).requires_grad_()
    whole = current.sum(1) - doubles(reference).sum(1)
    log_z = (doubles(returns) / beta - whole).mean().detach()
    loss = beta / 2 * (log_z + whole - doubles(returns) / beta).square().sum()
    (expected,) = torch.autograd.grad(loss, current)
    excess = balance_excess((logp - reference).sum(1), [0, 0, 0])
    settings = {"surrogate": {"kind": "trajectory_balance", "beta": beta}, "corrections": []}
    for i in range(3):
        found = gradient_of(
            settings,
            current=logp[i],
            behaviour=logp[i],
            advantage=[float(returns[i] - returns.mean())] * 4,
            balance_excess=torch.full((4,), float(excess[i])),
        )
        assert found == pytest.approx(expected[i].tolist(), abs=1e-5)


def test_a_gradient_loses_what_points_the_way_of_the_one_before():
    """g⁻ = (1, 0), g = (3, 4): cosine .6. With the ceiling 0 only (0, 4) stays, with .6 nothing is taken."""
    for ceiling, expected in ((0.0, [0.0, 4.0]), (0.6, [3.0, 4.0]), (0.28, [4 * 0.28 / 0.96, 4.0])):
        parameter = torch.nn.Parameter(torch.zeros(2))
        alignment = GradientAlignment(ceiling)
        parameter.grad = torch.tensor([1.0, 0.0])
        assert math.isnan(alignment.bound([parameter]))
        parameter.grad = torch.tensor([3.0, 4.0])
        assert alignment.bound([parameter]) == pytest.approx(0.6)
        assert parameter.grad.tolist() == pytest.approx(expected, abs=1e-6)
        parameter.grad = torch.tensor([3.0, 4.0])
        assert alignment.bound([parameter]) == pytest.approx(1.0), (
            "the gradient as it came is what is remembered"
        )


def test_gradients_apart_and_gradients_that_are_not_finite_are_left_alone():
    parameter, alignment = torch.nn.Parameter(torch.zeros(2)), GradientAlignment(0.1)
    for gradient in ([1.0, 0.0], [-3.0, 4.0], [math.nan, 1.0], [3.0, -4.0]):
        parameter.grad = torch.tensor(gradient)
        alignment.bound([parameter])
        np.testing.assert_array_equal(parameter.grad.numpy(), np.array(gradient, dtype=np.float32))


def test_where_the_gradient_moves_the_ratio_away():
    ratio, advantage = torch.tensor([1.1, 1.1, 0.9, 0.9, 1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert moves_away(ratio, advantage).tolist() == [True, False, False, True, False]
