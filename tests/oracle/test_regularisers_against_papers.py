"""Test KL penalties, entropy control and the fixed denominator against the papers' formulas."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.run_file.load import load
from learner.algorithms.regularisers import (
    band_weight,
    base_share,
    entropy_band_penalty,
    kl_convex,
    kl_estimate,
    kl_k1,
    kl_k2,
    kl_k3,
    next_entropy_coefficient,
)
from learner.algorithms.tokens import token_weights
from learner.settings.algorithm import AlgorithmConfig
from learner.update.adaptive import adaptive, after_update, first_state
from learner.update.objective import Adaptive, Tokens, make_objective

RNG = np.random.default_rng(3)
ESTIMATORS = ["k1", "k2", "k3"]
LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64)
OTHER = torch.tensor([-0.5, 0.4, 0.2, 1.1], dtype=torch.float64).log_softmax(0)


def loss_gradient(estimator):
    """Return the expected gradient with respect to the logits, for tokens sampled by the current policy.

    The expectation is a sum over all four outcomes. The sampling probability carries no gradient, as in
    training on tokens that were sampled before.
    """
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    (logp.detach().exp() * kl_estimate(logp, OTHER, estimator=estimator)).sum().backward()
    return logits.grad


def divergence_gradient(direction):
    """Return the gradient of the divergence itself, including the gradient of the sampling probability."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    a, b = (logp, OTHER) if direction == "reverse" else (OTHER, logp)
    (a.exp() * (a - b)).sum().backward()
    return logits.grad


def test_gradient_of_k1_as_a_loss_is_zero():
    assert loss_gradient("k1").abs().max() < 1e-15
    assert divergence_gradient("reverse").abs().max() > 0.1


def test_gradient_of_k2_as_a_loss_is_that_of_the_reverse_kl():
    torch.testing.assert_close(loss_gradient("k2"), divergence_gradient("reverse"), rtol=1e-12, atol=1e-15)


def test_gradient_of_k3_as_a_loss_is_that_of_the_forward_kl():
    """The gradient with respect to the logits is a - b. It is biased as a gradient of the reverse KL."""
    got = loss_gradient("k3")
    torch.testing.assert_close(got, LOGITS.softmax(0) - OTHER.exp(), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(got, divergence_gradient("forward"), rtol=1e-12, atol=1e-15)
    assert (got - divergence_gradient("reverse")).abs().max() > 0.05


def test_k3_is_cut_as_in_verl_and_slime():
    """clamp(exp(d) - 1 - d, at most 10): a token 19 nats below the reference has no slope, not one of 2e8."""
    now = torch.tensor([-1.0, -3.5, -4.0, -20.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0, -1.0, -13.0], dtype=torch.float64)
    d = (reference - now).detach()
    penalty = kl_estimate(now, reference, estimator="k3")
    torch.testing.assert_close(penalty.detach(), (d.exp() - 1 - d).clamp(max=10.0), rtol=1e-12, atol=0)
    penalty.sum().backward()
    slope = torch.where(d.exp() - 1 - d < 10, 1 - d.exp(), 0)
    torch.testing.assert_close(now.grad, slope, rtol=1e-12, atol=1e-15)
    assert now.grad.abs().max() < 14


@pytest.mark.parametrize(("name", "function"), [("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)])
def test_estimators_go_by_their_names(name, function):
    a, b = torch.tensor(-RNG.exponential(1, 20)), torch.tensor(-RNG.exponential(1, 20))
    assert torch.equal(kl_estimate(a, b, estimator=name), function(a, b).clamp(max=10))


def test_base_share_by_hand():
    """ReMix, arXiv:2507.06892: lambda(t) = max(1 - 0.1 ceil(max(t - 50, 0)/10), 0.5)."""
    shares = [base_share(step) for step in (0, 50, 51, 60, 61, 90, 91, 150)]
    assert shares == pytest.approx([1, 1, 0.9, 0.9, 0.8, 0.6, 0.5, 0.5])


@pytest.mark.parametrize(
    ("hold", "every", "drop", "floor"), [(50, 10, 0.1, 0.5), (0, 1, 0.3, 0.0), (3, 4, 0.25, 0.2)]
)
def test_base_share_equals_the_formula(hold, every, drop, floor):
    for step in range(200):
        expected = max(1 - drop * math.ceil(max(step - hold, 0) / every), floor)
        assert base_share(step, hold=hold, every=every, drop=drop, floor=floor) == pytest.approx(expected)


def test_base_share_needs_a_step():
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        base_share(3, every=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_kl_convex_equals_the_loop(estimator, share):
    now, base, before = (-RNG.exponential(1, 30) for _ in range(3))
    forms = {
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: min(10, math.exp(d) - 1 - d),
    }
    form = forms[estimator]
    expected = [
        share * form(b - n) + (1 - share) * form(p - n) for n, b, p in zip(now, base, before, strict=True)
    ]
    tensors = (torch.tensor(x) for x in (now, base, before))
    got = kl_convex(*tensors, base_share=share, estimator=estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_convex_rests_where_the_three_agree(estimator):
    same = torch.tensor([-0.1, -3.0], dtype=torch.float64)
    now = same.clone().requires_grad_()
    penalty = kl_convex(now, same, same, base_share=0.7, estimator=estimator)
    penalty.sum().backward()
    assert penalty.tolist() == [0, 0]
    assert now.grad.tolist() == [0, 0]


def test_kl_convex_pulls_to_the_mixture():
    """The k2 gradient vanishes at the weighted mean of the log-probabilities: .25 · -2 + .75 · -1 = -1.25."""
    now = torch.tensor([-1.25], dtype=torch.float64, requires_grad=True)
    base, before = torch.tensor([-2.0]), torch.tensor([-1.0])
    kl_convex(now, base, before, base_share=0.25, estimator="k2").sum().backward()
    assert now.grad.item() == pytest.approx(0, abs=1e-15)


def test_entropy_coefficient_by_hand():
    """arXiv:2505.22312: entropies .1 .1 .1 .3 .2 at target .2 move the coefficient by + + (bound) - -."""
    coefficient, path = 0.0, []
    for entropy in (0.1, 0.1, 0.1, 0.3, 0.2):
        coefficient = next_entropy_coefficient(coefficient, entropy, target=0.2, change=0.002, maximum=0.005)
        path.append(coefficient)
    assert path == pytest.approx([0.002, 0.004, 0.005, 0.003, 0.001])
    assert next_entropy_coefficient(0.001, 0.3, target=0.2, change=0.002, maximum=0.005) == 0


def test_fixed_aggregation_by_hand():
    """Dr. GRPO, arXiv:2503.20783: losses (1, 1, 1, 1) and (6) over 2 trajectories of at most 10: 10/20."""
    lengths = np.array([4, 1])
    weights = token_weights(lengths, aggregation="fixed", fixed_tokens=10)
    assert weights.tolist() == [0.05, 0.05]
    assert 4 * weights[0] * 1.0 + weights[1] * 6.0 == pytest.approx(0.5)
    assert (weights * lengths).sum() == pytest.approx(lengths.mean() / 10)


def test_fixed_aggregation_counts_trajectories_with_tokens():
    weights = token_weights(np.array([0, 3, 8, 0]), aggregation="fixed", fixed_tokens=4)
    assert weights.tolist() == [0, 1 / 8, 1 / 8, 0]
    assert token_weights(np.array([0, 0]), aggregation="fixed", fixed_tokens=4).tolist() == [0, 0]


def test_fixed_aggregation_needs_its_constant():
    with pytest.raises(ValueError, match="needs fixed_tokens >= 1, got 0"):
        token_weights(np.array([1]), aggregation="fixed")


def test_a_band_against_the_cases():
    """arXiv:2509.22576: below, inside and above [0.8, 1.2] of a mean of 2 nats; the gradient points back inside."""
    entropies = torch.tensor([1.0, 1.6, 2.0, 2.4, 3.0], dtype=torch.float64, requires_grad=True)
    penalty = entropy_band_penalty(entropies, mean=2.0, low=0.8, high=1.2)
    expected = [max(0.0, 1.6 - h) + max(0.0, h - 2.4) for h in entropies.tolist()]
    np.testing.assert_allclose(penalty.detach(), expected, atol=1e-12)
    penalty.sum().backward()
    assert entropies.grad.tolist()[::2] == [-1.0, 0.0, 1.0]


def test_the_weight_of_a_band_falls_from_2():
    """beta_0 = 2; with g = 1 and k = floor(K / 2) it is 1 + 1/e = 1.3679."""
    assert band_weight(0, 11, growth=1.0) == 2.0
    assert band_weight(5, 11, growth=1.0) == pytest.approx(1.3679, abs=1e-4)
    assert band_weight(0, 1, growth=1.0) == 2.0


def epo_gradient(config, numbers, entropies):
    """Return the gradient of the loss by the entropies of tokens with advantage 0."""
    n = len(entropies)
    entropy = torch.tensor(entropies, requires_grad=True)
    zeros, rows = torch.zeros(n), torch.arange(n)
    tokens = Tokens(
        weight=torch.full((n,), 1 / n),
        advantage=zeros,
        logp_behaviour=zeros,
        lag=zeros,
        sequence=rows,
        turn=rows,
    )
    loss, _ = make_objective(config)(tokens, numbers, zeros.clone().requires_grad_(), entropy)
    loss.backward()
    return entropy.grad


def test_epo_is_a_plain_bonus_inside_the_band_and_pulls_back_outside():
    """The recipe's numbers: after a mean of 2 nats, in the first of 10 updates, beta = 1 + exp(-1/5)."""
    config = load(Path("epo")).learner.algorithm
    state = first_state(config)
    before = adaptive(config, state, step=0, steps=10, bounds=None)
    assert (before.band_coefficient, before.entropy_coefficient) == (0.0, 0.03)
    for entropy in (1.0, 3.0):
        state = after_update(config, state, entropy=entropy)
    numbers = adaptive(config, state, step=1, steps=10, bounds=None)
    assert numbers.entropy_mean == 2.0
    slope = 0.03 * 0.1 * (1 + math.exp(-1 / 5))
    assert numbers.band_coefficient == pytest.approx(slope)
    got = epo_gradient(config, numbers, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(got, [(-0.03 - slope) / 3, -0.03 / 3, (-0.03 + slope) / 3], rtol=1e-5)
    plain = AlgorithmConfig.model_validate(config.model_dump() | {"entropy": {"coefficient": 0.03}})
    np.testing.assert_allclose(
        epo_gradient(plain, Adaptive(entropy_coefficient=0.03), [2.0])[0], -0.03, rtol=1e-5
    )
