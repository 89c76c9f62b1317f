"""Losses by origin against a slow numpy twin, and the numbers of the cards of AMPO and ICPO.

AMPO is arXiv:2510.02227, ICPO arXiv:2510.26519.
"""

import numpy as np
import pytest
import torch

from learner.settings.algorithm import AlgorithmConfig
from learner.settings.origins import OriginLoss, loss_number
from learner.settings.surrogates import ClipSurrogate, ShapedSurrogate
from learner.trajectory import Trajectory
from learner.update.objective import Adaptive, Tokens, make_objective
from tests.trajectories import make_trajectory

LOW, HIGH, SHAPING = 0.2, 0.28, 0.1
CLIP = ClipSurrogate(centre="behaviour", low=LOW, high=HIGH)
RULES = (
    OriginLoss(origin="taught", surrogate=ShapedSurrogate(shaping=SHAPING), weight=0.5),
    OriginLoss(origin="guided", only="success", surrogate=ShapedSurrogate(shaping=0.3)),
)
N = 40


def twin(p, mu, advantage, weight, number):
    """Return the objective of each token and the factor of grad log p in its gradient, token by token."""
    values, factors = np.zeros(len(p)), np.zeros(len(p))
    for i in range(len(p)):
        if number[i] == 0:
            ratio = p[i] / mu[i]
            plain, bounded = ratio * advantage[i], min(max(ratio, 1 - LOW), 1 + HIGH) * advantage[i]
            values[i] = min(plain, bounded)
            factors[i] = ratio * advantage[i] if plain <= bounded else 0.0
        else:
            shaping, factor = ((SHAPING, 0.5), (0.3, 1.0))[number[i] - 1]
            values[i] = factor * advantage[i] * p[i] / (p[i] + shaping)
            factors[i] = factor * advantage[i] * p[i] * shaping / (p[i] + shaping) ** 2
    return -(weight * values).sum(), -weight * factors


def tokens_of(rng, number=None):
    logp = torch.from_numpy(np.log(rng.uniform(0.01, 0.99, N))).requires_grad_()
    behaviour = logp.detach() + torch.from_numpy(rng.normal(0, 0.5, N))
    number = rng.integers(0, 3, N) if number is None else number
    foreign = number == 1
    # Nobody knows this one: a number that would overflow a ratio must not matter.
    behaviour[torch.from_numpy(foreign)] = -1e5
    row = torch.arange(N) // 4
    return logp, Tokens(
        logp_behaviour=behaviour,
        advantage=torch.from_numpy(rng.normal(0, 1, N)),
        weight=torch.full((N,), 1 / N, dtype=torch.float64),
        lag=torch.zeros(N),
        sequence=row,
        turn=row,
        foreign=torch.from_numpy(foreign) if foreign.any() else None,
        loss_number=torch.from_numpy(number).long(),
    )


@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_those_of_the_twin(seed):
    rng = np.random.default_rng(seed)
    logp, tokens = tokens_of(rng)
    objective = make_objective(AlgorithmConfig(surrogate=CLIP, by_origin=RULES))
    loss, diagnostics = objective(tokens, Adaptive(), logp, torch.zeros(N))
    loss.backward()
    expected, gradient = twin(
        logp.detach().exp().numpy(),
        tokens.logp_behaviour.exp().numpy(),
        tokens.advantage.numpy(),
        tokens.weight.numpy(),
        tokens.loss_number.numpy(),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(logp.grad.numpy(), gradient, rtol=1e-9, atol=1e-15)
    # What nobody knows is no staleness: the distance of these tokens from their behaviour policy is 0.
    foreign = tokens.foreign
    assert torch.equal(diagnostics.logp_behaviour[foreign], logp.detach()[foreign])
    assert (diagnostics.correction == 1).all()


def test_tokens_without_an_entry_have_the_loss_of_a_run_without_the_list_bit_for_bit():
    rng = np.random.default_rng(7)
    logp, tokens = tokens_of(rng, number=np.zeros(N, np.int64))
    twin_logp = logp.detach().clone().requires_grad_()
    with_list = make_objective(AlgorithmConfig(surrogate=CLIP, by_origin=RULES))
    plain = make_objective(AlgorithmConfig(surrogate=CLIP))
    one, _ = with_list(tokens, Adaptive(), logp, torch.zeros(N))
    two, _ = plain(tokens, Adaptive(), twin_logp, torch.zeros(N))
    one.backward()
    two.backward()
    assert torch.equal(one, two)
    assert torch.equal(logp.grad, twin_logp.grad)


def test_a_weight_alone_keeps_surrogate_and_corrections():
    rng = np.random.default_rng(8)
    logp, tokens = tokens_of(rng, number=np.ones(N, np.int64) * 0 + 2)
    tokens.loss_number[:] = 1
    rule = OriginLoss(origin="replayed", weight=0.25)
    losses = []
    for config in (AlgorithmConfig(by_origin=(rule,)), AlgorithmConfig()):
        losses.append(make_objective(config)(tokens, Adaptive(), logp, torch.zeros(N))[0].item())
    assert losses[0] == pytest.approx(0.25 * losses[1], rel=1e-12)


@pytest.mark.parametrize(
    ("p", "value", "weight"),
    [(0.01, 0.0909, 0.0826), (0.1, 0.5, 0.25), (0.5, 0.8333, 0.1389), (1, 0.9091, 0.0826)],
)
def test_the_cards_numbers(p, value, weight):
    """f(p) = p / (p + .1), and its gradient's weight .1 p / (p + .1)^2, which has its maximum at p = .1."""
    logp = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    row = torch.zeros(1, dtype=torch.int64)
    tokens = Tokens(-9 * one, one, one, torch.zeros(1), row, row, foreign=row == 0, loss_number=row + 1)
    taught = AlgorithmConfig(by_origin=(OriginLoss(origin="taught", surrogate=ShapedSurrogate()),))
    loss, _ = make_objective(taught)(tokens, Adaptive(), logp, torch.zeros(1))
    loss.backward()
    assert -loss.item() == pytest.approx(value, abs=5e-5)
    assert -logp.grad.item() == pytest.approx(weight, abs=5e-5)


def made(origin, correct: bool | None = None, reward=0.0) -> Trajectory:
    return make_trajectory("t", origin=origin, correct=correct, reward=reward)


def test_the_first_entry_that_fits_decides():
    rules = (
        OriginLoss(origin="own", only="failure"),
        OriginLoss(origin="own"),
        OriginLoss(origin="taught", only="success", surrogate=ShapedSurrogate()),
    )
    group = [made("own", correct) for correct in (False, True, False, False)]
    assert [loss_number(rules, t) for t in group] == [1, 2, 1, 1]
    assert [loss_number(rules, made("own", reward=r)) for r in (0.0, 0.5)] == [1, 2]
    assert [loss_number(rules, made("taught", c)) for c in (True, False)] == [3, 0]
    assert loss_number(rules, made("replayed", True)) == 0
