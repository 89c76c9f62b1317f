"""Properties of the objective for any numbers, with log ratios up to ±20."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.advantages import compare
from learner.algorithms.ratios import effective_sample_size, importance_ratio, truncated_correction
from learner.algorithms.regularisers import kl_k3
from learner.algorithms.tokens import assert_lag_bound, loss_mask, token_weights
from learner.settings.algorithm import AlgorithmConfig, KlPenalty
from learner.update.micro_batches import CutRule, choose_cuts
from learner.update.objective import Adaptive, Tokens, make_objective

log_ratios = st.lists(st.floats(-20, 20), min_size=1, max_size=20)


@given(log_ratios, st.floats(0.01, 100))
def test_truncated_weights_are_positive_and_below_the_ceiling(differences, ceiling):
    difference = torch.tensor(differences)
    ratio = importance_ratio(difference, torch.zeros_like(difference))
    weights, _ = truncated_correction(ratio, ceiling=ceiling)
    assert (weights > 0).all()
    assert (weights <= torch.tensor(ceiling)).all()


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20))
def test_ratios_are_finite_whatever_the_difference(differences):
    difference = torch.tensor(differences, dtype=torch.float32)
    assert torch.isfinite(importance_ratio(difference, torch.zeros_like(difference))).all()
    assert (kl_k3(difference, torch.zeros_like(difference)) >= 0).all()


@given(log_ratios)
def test_effective_sample_size_is_a_share(differences):
    weights = torch.tensor(differences).exp()
    share = effective_sample_size(weights).item()
    assert 1 / len(differences) - 1e-6 <= share <= 1 + 1e-6


@given(log_ratios, log_ratios, st.floats(-10, 10), st.sampled_from(["recomputed", "behaviour"]))
def test_loss_and_gradient_are_finite(current_proximal, proximal_behaviour, advantage, proximal):
    n = min(len(current_proximal), len(proximal_behaviour))
    behaviour = torch.zeros(n)
    logp_proximal = behaviour + torch.tensor(proximal_behaviour[:n])
    current = (logp_proximal + torch.tensor(current_proximal[:n])).requires_grad_()
    config = AlgorithmConfig(proximal=proximal, kl=KlPenalty(coefficient=0.1, to="proximal"))
    row = torch.zeros(n, dtype=torch.int64)
    tokens = Tokens(
        logp_behaviour=behaviour,
        advantage=torch.full((n,), advantage),
        weight=torch.full((n,), 1 / n),
        lag=torch.zeros(n),
        sequence=row,
        turn=row,
        logp_proximal=logp_proximal,
    )
    loss, _ = make_objective(config)(tokens, Adaptive(entropy_coefficient=0.1), current, torch.ones(n))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16), st.sampled_from(["std", "none"]))
def test_advantages_have_mean_zero_and_the_order_of_the_returns(returns, scale):
    values = np.array(returns)
    advantages = compare(values, ["g"] * len(values), scale=scale)
    size = np.abs(advantages).max() + 1e-9
    assert abs(advantages.mean()) <= 1e-6 * size + 1e-9
    order = np.argsort(values, kind="stable")
    assert (np.diff(advantages[order]) >= -1e-9 * size).all()
    if scale == "std":
        assert np.abs(advantages).max() <= np.sqrt(len(values))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20), st.sampled_from(["token_mean", "sequence_mean"])
)
def test_weights_of_a_mini_batch_sum_to_one(counts, aggregation):
    weights = token_weights(np.array(counts), aggregation=aggregation)
    total = float((weights * counts).sum())
    assert abs(total - (1 if any(counts) else 0)) < 1e-9


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=30),
    st.integers(0, 5),
)
def test_loss_mask_keeps_the_bound_it_is_checked_by(tokens, max_policy_lag):
    action_mask = np.array([action for action, _ in tokens])
    versions = np.array([version if action else -1 for action, version in tokens])
    mask = loss_mask(action_mask, versions, current_version=9, max_policy_lag=max_policy_lag)
    assert_lag_bound(mask, versions, current_version=9, max_policy_lag=max_policy_lag)
    assert not mask[~action_mask].any()
    left_out = action_mask & ~mask
    assert (9 - versions[left_out] > max_policy_lag).all()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(16, 1000), st.integers(0, 300))
def test_cuts_cover_all_rows_within_the_budget(lengths, budget, cost):
    lengths = sorted(lengths, reverse=True)
    cuts = choose_cuts(lengths, budget, CutRule(cost, least_cost=cost // 8))
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == len(lengths)
    for start, end in cuts:
        assert end > start
        assert (end - start) * lengths[start] <= budget or end - start == 1
