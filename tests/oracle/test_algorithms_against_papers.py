"""Test each function of `learner.algorithms` against a slow twin, a loop over tokens written from the paper.

The numbers in this file were worked out by hand; the docstring of each test shows how.
"""

import math

import numpy as np
import pytest
import torch

from learner.algorithms.advantages import compare
from learner.algorithms.ratios import effective_sample_size, importance_ratio, truncated_correction
from learner.algorithms.regularisers import entropy, kl_k1, kl_k2, kl_k3
from learner.algorithms.surrogates import clip_active, clipped_surrogate
from learner.algorithms.tokens import token_weights
from learner.settings.algorithm import AlgorithmConfig, KlPenalty
from learner.settings.corrections import TruncatedCorrection
from learner.settings.surrogates import ClipSurrogate
from learner.update.objective import Adaptive, Tokens, make_objective

RNG = np.random.default_rng(11)


def ppo_objective(ratio: float, advantage: float, low: float, high: float) -> float:
    """Return equation 7 of arXiv:1707.06347 for one token, case by case."""
    if advantage >= 0:
        return advantage * (1 + high if ratio > 1 + high else ratio)
    return advantage * (1 - low if ratio < 1 - low else ratio)


def slow_loss(
    current: list[list[float]],
    proximal: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    entropies: list[list[float]],
    config: AlgorithmConfig,
) -> float:
    """Return the whole objective, computed trajectory by trajectory and token by token."""
    sequence_sums, tokens = [], 0
    for i, advantage in enumerate(advantages):
        total = 0.0
        for t in range(len(current[i])):
            weight = 1.0
            for correction in config.corrections:
                ratio = math.exp(proximal[i][t]) / math.exp(behaviour[i][t])
                weight *= min(correction.ceiling, ratio)
            ratio = math.exp(current[i][t]) / math.exp(proximal[i][t])
            total -= weight * ppo_objective(ratio, advantage, config.surrogate.low, config.surrogate.high)
            total -= config.entropy.coefficient * entropies[i][t]
            back = proximal[i][t] - current[i][t]
            total += (config.kl.coefficient if config.kl else 0.0) * (math.exp(back) - 1 - back)
        sequence_sums.append(total)
        tokens += len(current[i])
    if config.aggregation == "token_mean":
        return sum(sequence_sums) / tokens
    means = [total / len(row) for total, row in zip(sequence_sums, current, strict=True)]
    return sum(means) / len(means)


CONFIGS = [
    AlgorithmConfig(surrogate=ClipSurrogate()),
    AlgorithmConfig(surrogate=ClipSurrogate(), aggregation="sequence_mean"),
    AlgorithmConfig(corrections=(), surrogate=ClipSurrogate(low=0.1, high=0.1)),
    AlgorithmConfig(
        corrections=(TruncatedCorrection(ceiling=0.7),),
        entropy={"coefficient": 0.03},
        kl=KlPenalty(coefficient=0.2, to="proximal"),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_objective_equals_the_loop_over_tokens(config):
    lengths = [4, 1, 7]
    draw = lambda: [(-np.abs(RNG.normal(1.0, 0.7, n))).tolist() for n in lengths]  # noqa: E731
    current, proximal, behaviour, entropies = draw(), draw(), draw(), draw()
    advantages = [0.9, -1.7, 0.2]
    expected = slow_loss(current, proximal, behaviour, advantages, entropies, config)
    weights = token_weights(np.array(lengths), aggregation=config.aggregation)
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.float64)  # noqa: E731
    tokens = Tokens(
        logp_behaviour=flat(behaviour),
        advantage=torch.tensor(np.repeat(advantages, lengths)),
        weight=torch.tensor(np.repeat(weights, lengths)),
        lag=torch.zeros(sum(lengths)),
        sequence=torch.tensor(np.repeat(np.arange(3), lengths)),
        turn=torch.tensor(np.repeat(np.arange(3), lengths)),
        logp_proximal=flat(proximal),
    )
    numbers = Adaptive(entropy_coefficient=config.entropy.coefficient)
    loss, diagnostics = make_objective(config)(tokens, numbers, flat(current), flat(entropies))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert diagnostics.loss.sum().item() == pytest.approx(expected, rel=1e-12)


def test_importance_ratio_by_hand():
    """0.5/0.25 = 2; 0.1/0.4 = 0.25; exp(20) = 4.85165e8 is the clamp."""
    ratio = importance_ratio(
        torch.tensor([math.log(0.5), math.log(0.1), 0.0]),
        torch.tensor([math.log(0.25), math.log(0.4), -90.0]),
    )
    assert ratio.tolist() == pytest.approx([2.0, 0.25, 4.85165e8], rel=1e-5)


def test_truncated_correction_by_hand():
    """IMPALA, section 4.1: rho = min(1, pi/mu). Ratios 2, 0.25, 1 give 1, 0.25, 1."""
    pi, mu = torch.tensor([0.5, 0.1, 0.3]).log(), torch.tensor([0.25, 0.4, 0.3]).log()
    weight, cut = truncated_correction(importance_ratio(pi, mu), ceiling=1.0)
    assert weight.tolist() == pytest.approx([1.0, 0.25, 1.0])
    assert cut.tolist() == [True, False, False]


def test_effective_sample_size_by_hand():
    """(1 + 2 + 3)² / (3 · (1 + 4 + 9)) = 36/42."""
    assert effective_sample_size(torch.tensor([1.0, 2.0, 3.0])).item() == pytest.approx(36 / 42)


def test_grpo_advantage_by_hand():
    """Returns 1, 0, 0, 1: mean 0.5, standard deviation 0.5, so ±1. Returns 2, 4, 9: mean 5, variance 26/3."""
    got = compare(np.array([1.0, 0.0, 0.0, 1.0]), list("aaaa"), scale="std")
    np.testing.assert_allclose(got, [1, -1, -1, 1], rtol=1e-5)
    got = compare(np.array([2.0, 4.0, 9.0]), list("bbb"), scale="std")
    np.testing.assert_allclose(got, np.array([-3, -1, 4]) / math.sqrt(26 / 3), rtol=1e-5)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_grpo_advantage_equals_the_loop_over_groups(scale):
    returns = RNG.normal(size=30)
    groups = [f"g{RNG.integers(6)}" for _ in range(30)]
    got = compare(returns, groups, scale=scale)
    for i in range(30):
        members = [returns[j] for j in range(30) if groups[j] == groups[i]]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / len(members))
        expected = returns[i] - mean if scale == "none" else (returns[i] - mean) / (std + 1e-6)
        assert got[i] == pytest.approx(expected if len(members) > 1 else 0.0, abs=1e-12)


def test_advantage_of_uniform_groups_is_exactly_zero():
    """0.1 + 0.2 is not 0.3 in binary; the division must not amplify this rounding error."""
    returns = np.array([0.1 + 0.2, 0.3, 0.3, 5.0])
    assert compare(returns, ["a", "a", "a", "b"], scale="std").tolist() == [0, 0, 0, 0]


def test_clipped_surrogate_equals_the_cases():
    ratios, advantages = RNG.lognormal(0, 0.5, 200), RNG.normal(size=200)
    got = clipped_surrogate(torch.tensor(ratios), torch.tensor(advantages), low=0.2, high=0.28)
    expected = [ppo_objective(r, a, 0.2, 0.28) for r, a in zip(ratios, advantages, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_clip_is_active_exactly_where_the_gradient_is_zero():
    ratio = torch.tensor(RNG.lognormal(0, 0.5, 200), requires_grad=True)
    advantage = torch.tensor(RNG.normal(size=200))
    clipped_surrogate(ratio, advantage, low=0.2, high=0.28).sum().backward()
    active = clip_active(ratio.detach(), advantage, low=0.2, high=0.28)
    assert torch.equal(active, ratio.grad == 0)
    assert 0.05 < active.double().mean() < 0.6


def test_kl_estimators_by_hand():
    """p = 1/2, q = 1/4 at the sampled token: d = -log 2; k1 = log 2, k2 = log²2/2, k3 = 1/2 - 1 + log 2."""
    p, q = torch.tensor([0.5]).log().double(), torch.tensor([0.25]).log().double()
    assert kl_k1(p, q).item() == pytest.approx(math.log(2))
    assert kl_k2(p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(p, q).item() == pytest.approx(math.log(2) - 0.5)


def test_kl_k1_and_k3_are_unbiased():
    """The sums of k1 and k3 over a distribution, weighted by p, give KL(p || q) = Σ p log(p/q)."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for estimator in (kl_k1, kl_k3):
        assert (p * estimator(p.log(), q.log())).sum().item() == pytest.approx(exact.item())


def test_entropy_by_hand():
    """Four equal outcomes: log 4. (1/2, 1/4, 1/8, 1/8): 7/4 log 2."""
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    assert entropy(rows.log()).tolist() == pytest.approx([math.log(4), 1.75 * math.log(2)])


@pytest.mark.parametrize(("aggregation", "expected"), [("token_mean", 0.2), ("sequence_mean", None)])
def test_aggregation_by_hand(aggregation, expected):
    """Losses (1, 1, 1, 1) and (6): the mean of tokens is 10/5 = 2, the mean of means (1 + 6)/2 = 3.5."""
    weights = token_weights(np.array([4, 1]), aggregation=aggregation)
    loss = 4 * weights[0] * 1.0 + weights[1] * 6.0
    assert loss == pytest.approx(2.0 if aggregation == "token_mean" else 3.5)
    if expected:
        assert weights.tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("config", CONFIGS[:3])
def test_equal_policies_reduce_to_the_on_policy_gradient(config):
    """All three policies equal: the gradient of the loss is -weight · advantage, as in REINFORCE."""
    logp = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    weight = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    row = torch.zeros(3, dtype=torch.int64)
    tokens = Tokens(logp.detach(), advantage, weight, torch.zeros(3), row, row, logp.detach())
    loss, diagnostics = make_objective(config)(tokens, Adaptive(), logp, torch.zeros(3))
    loss.backward()
    assert torch.equal(logp.grad, -weight * advantage)
    assert loss.item() == pytest.approx(-(weight * advantage).sum().item())
    assert not diagnostics.clipped.any()
    assert not diagnostics.truncated.any()


def test_proximal_behaviour_is_plain_ppo():
    """Proximal policy = behaviour policy: the weight is 1, and the clip acts on current / behaviour."""
    config = AlgorithmConfig(proximal="behaviour")
    current = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    behaviour = torch.tensor([-1.5, -2.1], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    weight, row = torch.full((2,), 0.5, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(behaviour, advantage, weight, lag=torch.zeros(2), sequence=row, turn=row)
    loss, diagnostics = make_objective(config)(tokens, Adaptive(), current, torch.zeros(2))
    assert loss.item() == pytest.approx(-(1.28 - math.exp(0.1)) / 2)
    assert diagnostics.clipped.tolist() == [True, False]
