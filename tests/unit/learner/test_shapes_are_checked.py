"""Functions of `learner.algorithms` raise at the door when one argument has a wrong shape.

Without the check, broadcasting would turn [N] and [N, 1] into [N, N], and the loss would still be a number.
"""

import numpy as np
import pytest
import torch

from learner.algorithms import (
    advantages,
    entropy,
    penalties,
    ratios,
    regularisers,
    replay,
    surrogates,
    tokens,
    values,
)
from learner.algorithms import advantages as comparisons
from learner.algorithms import advantages as truncation
from learner.algorithms import surrogates as clipping
from learner.algorithms import surrogates as ppo
from learner.algorithms.tokens import check_same_shape

# Good arguments of N = 3 tokens or trajectories, and numbers that any function accepts.
NUMBERS = torch.tensor([0.5, 1.0, 1.5])
IDS = torch.tensor([0, 0, 1])
FLAGS = torch.tensor([True, True, False])
ARRAY = np.array([0.5, 1.0, 1.5])
VERSIONS = np.array([3, 3, 3])
MASK = np.array([True, True, False])
GROUPS = ["a", "a", "b"]

CHECKED = [
    (comparisons.compare, {"values": ARRAY, "keys": GROUPS, "scale": "std"}),
    (comparisons.spread, {"values": ARRAY, "keys": GROUPS, "scale": "std"}),
    (advantages.median_relative_advantage, {"returns": ARRAY, "groups": GROUPS}),
    (advantages.token_group_advantage, {"returns": ARRAY, "lengths": ARRAY, "groups": GROUPS}),
    (advantages.greedy_baseline_advantage, {"returns": ARRAY, "baselines": ARRAY}),
    (advantages.whiten, {"values": ARRAY, "mask": MASK}),
    (advantages.informative_scale, {"returns": ARRAY, "groups": GROUPS}),
    (
        clipping.balance_sums,
        {"ratio": NUMBERS, "advantage": NUMBERS, "weight": NUMBERS, "path": [(0.8, 1.2)]},
    ),
    (clipping.choose_bounds, {"sums": torch.ones(2, 2), "path": [(0.8, 1.2), (0.8, 1.3)], "target": 0.5}),
    (
        entropy.hapo_redistribute,
        {"advantage": NUMBERS, "ratio": NUMBERS, "signal": NUMBERS, "low": 0.2, "high": 0.2},
    ),
    (entropy.entropy_change, {"logp": NUMBERS, "advantage": NUMBERS, "active": FLAGS}),
    (entropy.entropy_quadrants, {"logp": NUMBERS, "advantage": NUMBERS, "active": FLAGS}),
    (penalties.ratio_variance_surrogate, {"ratio": NUMBERS, "advantage": NUMBERS, "dual": 1.0}),
    (penalties.bounded_surrogate, {"ratio": NUMBERS, "target": NUMBERS, "weight": NUMBERS}),
    (penalties.mirror_descent_surrogate, {"ratio": NUMBERS, "advantage": NUMBERS, "step_size": 1.0}),
    (ratios.importance_ratio, {"logp_numerator": NUMBERS, "logp_denominator": NUMBERS}),
    (ratios.segment_mean, {"values": NUMBERS, "segment": IDS}),
    (ratios.segment_ratio, {"logp_numerator": NUMBERS, "logp_denominator": NUMBERS, "segment": IDS}),
    (ratios.product_ratio, {"logp_numerator": NUMBERS, "logp_denominator": NUMBERS, "sequence": IDS}),
    (
        ratios.level_ratio,
        {
            "logp_numerator": NUMBERS,
            "logp_denominator": NUMBERS,
            "level": "token",
            "sequence": IDS,
            "turn": IDS,
        },
    ),
    (ratios.interpolated_proximal, {"logp_behaviour": NUMBERS, "logp_current": NUMBERS, "lag": IDS}),
    (regularisers.kl_k1, {"logp_a": NUMBERS, "logp_b": NUMBERS}),
    (regularisers.kl_k2, {"logp_a": NUMBERS, "logp_b": NUMBERS}),
    (regularisers.kl_k3, {"logp_a": NUMBERS, "logp_b": NUMBERS}),
    (regularisers.kl_estimate, {"logp_a": NUMBERS, "logp_b": NUMBERS, "estimator": "k3"}),
    (
        regularisers.kl_convex,
        {
            "logp_current": NUMBERS,
            "logp_base": NUMBERS,
            "logp_predecessor": NUMBERS,
            "base_share": 0.5,
            "estimator": "k2",
        },
    ),
    (replay.last_success_logits, {"returns": ARRAY, "order": ARRAY, "threshold": 0.5}),
    (replay.advantage_logits, {"advantages": ARRAY, "recalibrated": ARRAY}),
    (
        tokens.loss_mask,
        {"action_mask": MASK, "policy_version": VERSIONS, "current_version": 4, "max_policy_lag": 1},
    ),
    (
        tokens.assert_lag_bound,
        {"mask": MASK, "policy_version": VERSIONS, "current_version": 4, "max_policy_lag": 1},
    ),
    (ppo.clipped_surrogate, {"ratio": NUMBERS, "advantage": NUMBERS, "low": 0.2, "high": 0.2}),
    (ppo.clip_active, {"ratio": NUMBERS, "advantage": NUMBERS, "low": 0.2, "high": 0.2}),
    (
        surrogates.dual_clipped_surrogate,
        {"ratio": NUMBERS, "advantage": NUMBERS, "low": NUMBERS, "high": NUMBERS},
    ),
    (
        surrogates.window_clipped_surrogate,
        {"ratio_current_behaviour": NUMBERS, "centre": NUMBERS, "advantage": NUMBERS, "epsilon": 0.2},
    ),
    (
        surrogates.triplet_clipped_surrogate,
        {
            "ratio_current_behaviour": NUMBERS,
            "advantage": NUMBERS,
            "negative_low": 0.8,
            "negative_high": 5.0,
            "positive_high": 1.2,
        },
    ),
    (
        surrogates.weighted_surrogate,
        {"logp_current": NUMBERS, "ratio": NUMBERS, "advantage": NUMBERS, "high": 2.0},
    ),
    (
        surrogates.minirl_surrogate,
        {
            "logp_current": NUMBERS,
            "ratio_current_proximal": NUMBERS,
            "ratio_current_behaviour": NUMBERS,
            "advantage": NUMBERS,
            "low": 0.2,
            "high": 0.2,
            "ceiling": 5.0,
        },
    ),
    (surrogates.chunk_surrogate, {"logp_current": NUMBERS, "ratio_chunk": NUMBERS, "return_": NUMBERS}),
    (
        truncation.extended_gae,
        {"rewards": ARRAY, "values": ARRAY, "finished": True, "discount": 1.0, "trace": 0.9},
    ),
    (
        values.value_loss,
        {
            "values": NUMBERS,
            "targets": NUMBERS,
            "values_before": NUMBERS,
            "clip_low": 0.5,
            "clip_high": 0.5,
        },
    ),
    (values.lambda_returns, {"advantage": ARRAY, "values": ARRAY}),
    (
        values.vtrace_targets,
        {"rewards": ARRAY, "values": ARRAY, "ratios": ARRAY, "bootstrap": 0.0, "discount": 1.0},
    ),
    (values.explained_variance, {"targets": ARRAY, "values": ARRAY}),
]

WRONG_SHAPES = {
    "a column": lambda good: good.reshape(-1, 1),
    "one element": lambda good: good[:1],
}

ONE_WRONG_ARGUMENT = [
    pytest.param(function, arguments, name, id=f"{function.__name__}-{name}")
    for function, arguments in CHECKED
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor | np.ndarray)
]


@pytest.mark.parametrize(("function", "arguments"), CHECKED, ids=[f.__name__ for f, _ in CHECKED])
def test_arguments_of_one_shape_pass(function, arguments):
    function(**arguments)


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
@pytest.mark.parametrize(("function", "arguments", "name"), ONE_WRONG_ARGUMENT)
def test_one_argument_of_a_wrong_shape_raises(function, arguments, name, wrong):
    spoiled = arguments | {name: WRONG_SHAPES[wrong](arguments[name])}
    with pytest.raises(ValueError):
        function(**spoiled)


def test_numbers_and_missing_tensors_fit_every_shape():
    check_same_shape(ratio=NUMBERS, low=0.2, high=torch.tensor(0.2), before=None)


def test_the_error_names_the_arguments_and_their_shapes():
    with pytest.raises(ValueError, match=r"got ratio \(3,\), advantage \(3, 1\)"):
        ppo.clip_active(NUMBERS, NUMBERS.reshape(-1, 1), low=0.2, high=0.2)
