"""SRPO (arXiv:2604.02288): what its card says of failures with a solved sibling, by a second form in numpy."""

import numpy as np
import pytest
import torch

from learner.algorithms.regularisers import sibling_weights
from learner.settings.algorithm import AlgorithmConfig
from learner.update.objective import Adaptive, Tokens, make_objective
from learner.update.siblings import behind_siblings, solved_siblings
from tests.trajectories import batch_of, make_trajectory

BETA, LIMIT = 1.0, 2.0


def group(name, returns, **changes):
    return [
        make_trajectory(f"{name}.{n}", group=name, actions=2 + n, reward=r, **changes)
        for n, r in enumerate(returns)
    ]


def test_the_weights_are_those_of_the_card():
    weights = sibling_weights(torch.tensor([0.1, 1.0, 2.0]), beta=1.0)
    np.testing.assert_allclose(weights, [1.9278, 0.7838, 0.2883], atol=1e-4)
    assert float(weights.mean()) == pytest.approx(1.0)
    assert sibling_weights(torch.tensor([0.1, 1.0, 2.0]), beta=0.0).tolist() == [1.0, 1.0, 1.0]
    large = sibling_weights(torch.tensor([900.0, 900.0]), beta=1.0)
    assert large.tolist() == [1.0, 1.0], "the smallest weights do not vanish"


def test_failures_with_a_solved_sibling_learn_from_it_and_no_others():
    """Card 50: z_i = (1 - c_i) m_i; rewards (0, 1, 0, 0) route rollout 1 to GRPO and 0, 2, 3 behind rollout 1."""
    batch = [*group("a", (0, 1, 0, 0)), *group("b", (0, 0)), *group("c", (1, 1)), *group("d", (0, 1, 1))]
    assert solved_siblings(batch).tolist() == [1, -1, 1, 1, -1, -1, -1, -1, 9, -1, -1]
    taught = group("e", (0, 1), origin="taught")
    assert solved_siblings([taught[1], group("e", (0,))[0]]).tolist() == [-1, -1], "only of the policy's own"
    wrong = group("f", (0.6, 0.7), correct=False)
    assert solved_siblings([*wrong, *group("f", (0,), correct=True)]).tolist() == [2, 2, -1]


def test_a_failure_stands_behind_the_whole_sibling():
    own = [*group("a", (0, 1, 0)), *group("b", (0,))]
    batch = batch_of(own, siblings=solved_siblings(own))
    whole, places = behind_siblings(batch)
    expected = [np.concatenate([own[1].token_ids, own[i].token_ids]) for i in (0, 2)]
    assert whole.lengths.tolist() == [len(e) for e in expected]
    np.testing.assert_array_equal(whole.token_ids, np.concatenate(expected))
    seen = [np.concatenate([np.zeros(len(own[1]), bool), own[i].action_mask]) for i in (0, 2)]
    np.testing.assert_array_equal(whole.loss_mask, np.concatenate(seen))
    np.testing.assert_array_equal(whole.token_ids[whole.seen_mask], batch.token_ids[places])
    alone = batch_of(own[3:], siblings=solved_siblings(own[3:]))
    assert behind_siblings(alone) is None


def objective(weights, advantage, behaviour, current, average):
    """Return the loss and its gradient by the log-probabilities, as the learner computes them."""
    config = AlgorithmConfig.model_validate({"siblings": {"beta": BETA, "limit": LIMIT}})
    logp = torch.tensor(current, requires_grad=True)
    count = torch.zeros(len(current), dtype=torch.int64)
    tokens = Tokens(
        logp_behaviour=torch.tensor(behaviour),
        advantage=torch.tensor(advantage),
        weight=torch.full((len(current),), 1 / len(current), dtype=torch.float64),
        lag=torch.zeros(len(current)),
        sequence=count,
        turn=count,
        logp_average=torch.tensor(average),
        sibling_weight=torch.tensor(weights),
    )
    loss, diagnostics = make_objective(config)(tokens, Adaptive(), logp, torch.zeros(len(current)))
    loss.backward()
    return logp.grad.numpy(), diagnostics


def test_both_parts_have_one_denominator_and_the_ratio_of_both_is_at_most_2():
    """Card 50: L = (sum of GRPO tokens + sum of w times distilled tokens) / all; ratio clipped at 2 in both."""
    rng = np.random.default_rng(0)
    behaviour, average = np.log(rng.uniform(0.05, 0.9, 12)), np.log(rng.uniform(0.001, 0.99, 12))
    current = behaviour + rng.normal(0, 1.2, 12)
    routed = np.arange(12) % 3 > 0
    entropy = rng.uniform(0, 2, 12)
    raw = np.exp(-BETA * entropy[routed])
    weights = np.zeros(12)
    weights[routed] = raw / raw.mean()
    advantage = rng.normal(0, 1, 12)
    ratio = np.minimum(2.0, np.exp(current - behaviour))
    signal = np.clip(average - current, -LIMIT, LIMIT)
    assert (np.exp(current - behaviour) > 2).any()
    assert (np.abs(average - current) > LIMIT).any()
    expected = -ratio * np.where(routed, weights * signal, advantage) / 12
    found, diagnostics = objective(weights, advantage, behaviour, current, average)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(diagnostics.advantage[routed], (weights * signal)[routed], rtol=1e-6)


def test_without_a_sibling_all_tokens_learn_as_ever():
    """Card 50: z all 0 -> equals masked GRPO token mean."""
    behaviour, advantage = np.log([0.5, 0.25, 0.1]), np.array([0.5, -0.5, 0.5])
    found, _ = objective(np.zeros(3), advantage, behaviour, behaviour, np.zeros(3))
    np.testing.assert_allclose(found, -advantage / 3, rtol=1e-6)
