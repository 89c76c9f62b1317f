"""Test advantages and value targets: T-PPO (arXiv:2506.15050), V-trace (arXiv:1802.01561), value losses.

The twins are sums written from the definitions, without the backward recursions of the implementation.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.advantages import Estimates, assign_advantages
from learner.algorithms.advantages import adaptive_trace, extended_gae, monte_carlo_returns, tail_mask
from learner.algorithms.values import (
    explained_variance,
    lambda_returns,
    value_loss,
    vtrace_targets,
)
from learner.settings.algorithm import AlgorithmConfig
from protocol.messages.episodes import Reward, Turn
from tests.trajectories import make_trajectory

RNG = np.random.default_rng(31)
VALUES = [0.2, 0.4, 0.5, 0.3]
LONG = [0.2, 0.4, 0.5, 0.3, 0.35, 0.6, 0.7, 0.9]


def slow_gae(rewards, values, after, discount, trace):
    """Return equation 16 of arXiv:1506.02438; ``after`` is the value after the last token."""
    following = [*values[1:], after]
    deltas = [r + discount * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    size = len(deltas)
    return [sum((discount * trace) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)]


def slow_vtrace(rewards, values, ratios, after, discount, ceiling_rho, ceiling_c, trace):
    """Return arXiv:1802.01561's equation 1: for each s a sum over t, for each t a product over i."""
    size, following, targets = len(values), [*values[1:], after], []
    for s in range(size):
        total = values[s]
        for t in range(s, size):
            product = math.prod(trace * min(ceiling_c, ratios[i]) for i in range(s, t))
            delta = min(ceiling_rho, ratios[t]) * (rewards[t] + discount * following[t] - values[t])
            total += discount ** (t - s) * product * delta
        targets.append(total)
    return targets


# --- extended GAE ---------------------------------------------------------------------------------------------


def test_unfinished_by_hand():
    """Deltas .2, .1, -.2, 0; -.2 * .95 + .1 = -.09; -.09 * .95 + .2 = .1145."""
    result = extended_gae([0] * 4, VALUES, finished=False, discount=1.0, trace=0.95)
    np.testing.assert_allclose(result, [0.1145, -0.09, -0.2, 0], atol=1e-12)


def test_finished_by_hand():
    """Last delta 1 - .3 = .7; then .7 * .95 - .2 = .465, and so on; equal to plain GAE."""
    rewards = [0, 0, 0, 1]
    result = extended_gae(rewards, VALUES, finished=True, discount=1.0, trace=0.95)
    np.testing.assert_allclose(result, [0.714662, 0.54175, 0.465, 0.7], atol=5e-7)
    np.testing.assert_allclose(result, slow_gae(rewards, VALUES, 0.0, 1.0, 0.95), atol=1e-12)


def test_unfinished_and_discounted_by_hand():
    """Last delta (.99 - 1) * .3 = -.003."""
    result = extended_gae([0] * 4, VALUES, finished=False, discount=0.99, trace=0.95)
    np.testing.assert_allclose(result, [0.10329, -0.098575, -0.205822, -0.003], atol=5e-7)


def test_undiscounted_advantages_are_differences_to_the_last_value():
    values = RNG.normal(size=12)
    result = extended_gae(np.zeros(12), values, finished=False, discount=1.0, trace=1.0)
    np.testing.assert_allclose(result, values[-1] - values, atol=1e-12)


def test_what_a_window_of_a_longer_response_gets_wrong():
    """A response of eight tokens has two windows, W = 4; only the advantages of the first are biased."""
    rewards = [0.0] * 7 + [1.0]
    full = extended_gae(rewards, LONG, finished=True, discount=1.0, trace=0.95)
    expected = [0.655226, 0.479185, 0.399142, 0.630676, 0.611237, 0.38025, 0.295, 0.1]
    np.testing.assert_allclose(full, expected, atol=5e-7)
    first = extended_gae(rewards[:4], LONG[:4], finished=False, discount=1.0, trace=0.95)
    second = extended_gae(rewards[4:], LONG[4:], finished=True, discount=1.0, trace=0.95)
    np.testing.assert_allclose(second, full[4:], atol=1e-12)
    np.testing.assert_allclose(full[:4] - first, [0.540726, 0.569185, 0.599142, 0.630676], atol=5e-7)


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.97, 0.8), (0.9, 1.0)])
def test_bias_in_closed_form(discount, trace):
    rewards, values, cut = RNG.normal(size=11), RNG.normal(size=11), 5
    full = extended_gae(rewards, values, finished=True, discount=discount, trace=trace)
    window = extended_gae(rewards[:cut], values[:cut], finished=False, discount=discount, trace=trace)
    edge = discount * (values[cut] - values[cut - 1]) + discount * trace * full[cut]
    bias = [(discount * trace) ** (cut - 1 - t) * edge for t in range(cut)]
    np.testing.assert_allclose(full[:cut] - window, bias, atol=1e-12)


def test_a_true_bootstrap_takes_the_place_of_the_last_value():
    rewards, values = RNG.normal(size=6), RNG.normal(size=6)
    result = extended_gae(rewards, values, finished=False, discount=0.9, trace=0.8, bootstrap=2.5)
    np.testing.assert_allclose(result, slow_gae(rewards, values, 2.5, 0.9, 0.8), atol=1e-12)
    own = extended_gae(rewards, values, finished=False, discount=0.9, trace=0.8, bootstrap=float(values[-1]))
    default = extended_gae(rewards, values, finished=False, discount=0.9, trace=0.8)
    assert own.tolist() == default.tolist()


def test_a_bootstrap_of_zero_is_a_bootstrap():
    zero = extended_gae([0.0], [0.5], finished=False, discount=1.0, trace=0.9, bootstrap=0.0)
    assert zero.tolist() == [-0.5]


def test_a_finished_response_has_nothing_to_bootstrap_from():
    with pytest.raises(ValueError, match="value after its end is 0"):
        extended_gae([1.0], [0.5], finished=True, discount=1.0, trace=0.9, bootstrap=0.1)


def test_an_empty_window():
    assert extended_gae([], [], finished=False, discount=1.0, trace=0.9).shape == (0,)


@pytest.mark.parametrize(
    ("length", "trace"), [(400, 0.95), (800, 0.975), (8192, 0.997559), (24576, 0.999186)]
)
def test_adaptive_trace(length, trace):
    assert adaptive_trace(length, unfinished=False, window=8192) == pytest.approx(trace, abs=5e-7)


def test_an_unfinished_response_counts_half_a_window_more():
    odd = adaptive_trace(700, unfinished=True, window=201)
    assert odd == adaptive_trace(800, unfinished=False, window=201) == pytest.approx(0.975)


def test_short_responses_keep_the_base():
    assert adaptive_trace(1, unfinished=False, window=8, base=0.9) == 0.9
    assert (
        adaptive_trace(399, unfinished=False, window=8)
        == 0.95
        < adaptive_trace(401, unfinished=False, window=8)
    )


def test_tail():
    assert np.flatnonzero(~tail_mask(20, finished=False)).tolist() == list(range(12, 20))
    assert tail_mask(20, finished=True).all()
    assert not tail_mask(5, finished=False).any()
    assert tail_mask(5, finished=False, ignore=0).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: extended_gae([1.0], [1.0, 2.0], finished=True, discount=1.0, trace=0.9),
        lambda: adaptive_trace(0, unfinished=True, window=8),
        lambda: adaptive_trace(5, unfinished=True, window=8, alpha=0.0),
        lambda: tail_mask(4, finished=False, ignore=-1),
        lambda: lambda_returns([1.0], [1.0, 2.0]),
        lambda: explained_variance([1.0], [1.0, 2.0]),
        lambda: vtrace_targets([1.0], [1.0], [-0.1], bootstrap=0.0, discount=1.0),
        lambda: vtrace_targets([1.0], [1.0], [math.inf], bootstrap=0.0, discount=1.0),
        lambda: vtrace_targets([1.0], [1.0, 1.0], [1.0], bootstrap=0.0, discount=1.0),
        lambda: vtrace_targets([1.0], [1.0], [1.0], bootstrap=0.0, discount=1.0, ceiling_rho=0.5),
        lambda: value_loss(torch.zeros(1), torch.zeros(1), None, clip_low=-0.1, clip_high=0.1),
    ],
)
def test_refused(call):
    with pytest.raises(ValueError):
        call()


# --- windows: training data of the policy and the critic ------------------------------------------------------

PROMPT, RESPONSE = 3, 11
WINDOWED = AlgorithmConfig.model_validate(
    {"advantage": {"kind": "gae", "ignored_tail": 0, "whiten": False, "ceiling": 1e9}, "critic": {}},
    strict=False,
)


def as_trained(window, values):
    """Yield the learner's credit of one response, step by step, as windows of ``window`` tokens arrive."""
    whole = make_trajectory("t", prompt=PROMPT, actions=RESPONSE, reward=1.0)
    for start in range(0, RESPONSE, window):
        end = min(start + window, RESPONSE)
        finished, length = end == RESPONSE, PROMPT + end
        seen = replace(
            whole,
            status="finished" if finished else "unfinished",
            token_ids=whole.token_ids[:length],
            action_mask=whole.action_mask[:length],
            logp_behaviour=whole.logp_behaviour[:length],
            policy_version=whole.policy_version[:length],
            turns=[Turn(0, 0, PROMPT, False), Turn(1, PROMPT, length, True)],
            rewards=[Reward("score", 1, 1.0)] if finished else [],
            window_start=PROMPT + start if start else 0,
        )
        yield assign_advantages(WINDOWED, [seen], Estimates(values[:length], np.ones(length)))


@pytest.mark.parametrize("window", [1, 3, 4, 11, 50])
def test_each_token_is_learned_from_once_by_the_policy_and_once_by_the_critic(window):
    values = RNG.normal(size=PROMPT + RESPONSE)
    policy, critic = np.zeros(PROMPT + RESPONSE, dtype=int), np.zeros(PROMPT + RESPONSE, dtype=int)
    steps = list(as_trained(window, values))
    assert len(steps) == math.ceil(RESPONSE / window)
    for credit in steps:
        policy[: len(credit.policy)] += credit.policy
        critic[: len(credit.value)] += credit.value
    once = [0] * PROMPT + [1] * RESPONSE
    assert policy.tolist() == once
    assert critic.tolist() == once


def test_without_a_finished_response_the_critic_learns_nothing():
    *unfinished, last = as_trained(4, RNG.normal(size=PROMPT + RESPONSE))
    assert len(unfinished) == 2
    assert not any(credit.value.any() for credit in unfinished)
    np.testing.assert_array_equal(last.value_target[last.value], np.ones(RESPONSE))


def test_a_window_as_long_as_the_response_is_ordinary_ppo():
    values = RNG.normal(size=PROMPT + RESPONSE)
    (credit,) = as_trained(RESPONSE, values)
    rewards = [0.0] * (RESPONSE - 1) + [1.0]
    expected = slow_gae(rewards, list(values[PROMPT:]), 0.0, 1.0, 0.95)
    np.testing.assert_allclose(credit.advantage[PROMPT:], expected, atol=1e-12)
    assert credit.policy.tolist() == credit.value.tolist() == [False] * PROMPT + [True] * RESPONSE


# --- value targets --------------------------------------------------------------------------------------------


def test_monte_carlo_against_the_sum():
    rewards = RNG.normal(size=8)
    expected = [sum(0.9 ** (k - t) * rewards[k] for k in range(t, 8)) for t in range(8)]
    np.testing.assert_allclose(monte_carlo_returns(rewards, discount=0.9), expected, atol=1e-12)


def test_lambda_one_gives_monte_carlo_returns():
    rewards, values = RNG.normal(size=9), RNG.normal(size=9)
    advantages = extended_gae(rewards, values, finished=True, discount=0.9, trace=1.0)
    expected = monte_carlo_returns(rewards, discount=0.9)
    np.testing.assert_allclose(lambda_returns(advantages, values), expected, atol=1e-12)


def test_lambda_returns_against_the_mixture_of_n_step_returns():
    """(1 - lambda) sum lambda^(n-1) G^(n); the remaining weight is on the return to the end."""
    rewards, values, discount, trace, size = RNG.normal(size=7), RNG.normal(size=7), 0.9, 0.8, 7
    advantages = extended_gae(rewards, values, finished=True, discount=discount, trace=trace)
    for t in range(size):
        mixture = 0.0
        for n in range(1, size - t + 1):
            g = sum(discount**k * rewards[t + k] for k in range(n))
            at_end = t + n == size
            g += 0.0 if at_end else discount**n * values[t + n]
            mixture += trace ** (n - 1) * (1 if at_end else 1 - trace) * g
        assert lambda_returns(advantages, values)[t] == pytest.approx(mixture, abs=1e-12)


@pytest.mark.parametrize(
    ("ceiling_rho", "ceiling_c", "trace"), [(1, 1, 1), (1.5, 1, 1), (2, 0.7, 0.9), (9, 9, 0.5)]
)
def test_vtrace_against_the_sum_of_the_paper(ceiling_rho, ceiling_c, trace):
    rewards, values = RNG.normal(size=9), RNG.normal(size=9)
    ratios = np.exp(RNG.normal(size=9))
    assert ratios.min() < 0.7
    assert ratios.max() > 1.5
    expected = slow_vtrace(rewards, values, ratios, 0.4, 0.95, ceiling_rho, ceiling_c, trace)
    targets, advantages = vtrace_targets(
        rewards,
        values,
        ratios,
        bootstrap=0.4,
        discount=0.95,
        ceiling_rho=ceiling_rho,
        ceiling_c=ceiling_c,
        trace=trace,
    )
    np.testing.assert_allclose(targets, expected, atol=1e-12)
    following = [*expected[1:], 0.4]
    for t in range(9):
        one_step = rewards[t] + 0.95 * following[t] - values[t]
        assert advantages[t] == pytest.approx(min(ceiling_rho, ratios[t]) * one_step, abs=1e-12)


def test_vtrace_by_hand():
    """Ratios 2 and .5: deltas 1 * (.5 - .5) = 0 and .5 * (1 - .5) = .25.

    The targets are .5 + 1 * .25 and .75. The advantages are 1 * (.75 - .5) and .5 * (1 - .5).
    """
    result = vtrace_targets([0.0, 1.0], [0.5, 0.5], [2.0, 0.5], bootstrap=0.0, discount=1.0)
    assert result.targets.tolist() == [0.75, 0.75]
    assert result.advantages.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("trace", [0.0, 0.7, 1.0])
def test_on_policy_vtrace_gives_lambda_returns(trace):
    rewards, values, ones = RNG.normal(size=8), RNG.normal(size=8), np.ones(8)
    advantages = extended_gae(rewards, values, finished=False, discount=0.9, trace=trace, bootstrap=0.3)
    result = vtrace_targets(rewards, values, ones, bootstrap=0.3, discount=0.9, trace=trace)
    np.testing.assert_allclose(result.targets, lambda_returns(advantages, values), atol=1e-12)


def test_vtrace_keeps_the_values_where_the_policy_would_never_have_acted_so():
    values = RNG.normal(size=5)
    result = vtrace_targets(np.ones(5), values, np.zeros(5), bootstrap=1.0, discount=0.9)
    assert result.targets.tolist() == values.tolist()
    assert not result.advantages.any()


# --- value loss -----------------------------------------------------------------------------------------------


def slow_value_loss(value, target, before, low, high):
    """Return the loss of one token and its gradient, case by case."""
    plain = (value - target) ** 2
    if before is None:
        return plain / 2, value - target
    near = before - low if value < before - low else before + high if value > before + high else value
    clipped = (near - target) ** 2
    if clipped > plain:
        return clipped / 2, (value - target) if near == value else 0.0
    return plain / 2, value - target


@pytest.mark.parametrize("clipped", [True, False])
def test_value_loss_and_gradient_against_the_cases(clipped):
    values, targets, before = RNG.normal(size=(3, 200))
    tensor = torch.tensor(values, requires_grad=True)
    loss = value_loss(
        tensor,
        torch.tensor(targets),
        torch.tensor(before) if clipped else None,
        clip_low=0.5,
        clip_high=0.6,
    )
    loss.sum().backward()
    pairs = [
        slow_value_loss(v, r, b if clipped else None, 0.5, 0.6)
        for v, r, b in zip(values, targets, before, strict=True)
    ]
    np.testing.assert_allclose(loss.detach().numpy(), [pair[0] for pair in pairs], atol=1e-12)
    np.testing.assert_allclose(tensor.grad.numpy(), [pair[1] for pair in pairs], atol=1e-12)
    assert any(pair[1] == 0 for pair in pairs) == clipped


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient"),
    [
        (1.0, 2.0, 0.98, 0.0),  # above .6, target further up: (.6 - 2)^2 / 2, no gradient
        (1.0, 0.0, 0.5, 1.0),  # above .6, target below: pulled back
        (-1.0, -2.0, 1.125, 0.0),  # below -.5: (-.5 + 2)^2 / 2
        (0.6, 2.0, 0.98, -1.4),  # on the bound .6: not clipped
        (-1.0, -0.75, 0.03125, -0.25),  # clipped to -.5 as far from the target: the whole gradient
        (0.1, 0.3, 0.02, -0.2),
    ],
)
def test_value_loss_by_hand(value, target, loss, gradient):
    tensor = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    constant = torch.zeros(1, dtype=torch.float64)
    result = value_loss(tensor, constant + target, constant, clip_low=0.5, clip_high=0.6)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert tensor.grad.item() == pytest.approx(gradient)


def test_targets_and_earlier_values_are_constants():
    values, targets, before = (torch.rand(5, requires_grad=True) for _ in range(3))
    value_loss(values, targets, before, clip_low=0.1, clip_high=0.1).sum().backward()
    assert values.grad is not None
    assert targets.grad is None
    assert before.grad is None


def test_explained_variance_by_hand():
    """Targets 0, 2 (variance 1), values 0, 1 (errors 0, 1, variance 1/4); an offset changes nothing."""
    assert explained_variance([0, 2], [0, 1]) == 0.75
    assert explained_variance([0, 2], [10, 11]) == 0.75
    assert explained_variance([0, 2], [1, 1]) == 0.0
    assert explained_variance([0, 2], [2, 0]) == -3.0


@pytest.mark.parametrize("targets", [[], [0.1, 0.1, 0.1]])
def test_nothing_to_explain(targets):
    assert math.isnan(explained_variance(targets, np.arange(len(targets))))
