"""The learner trains a mixture of experts with the routes of the proximal policy, on one rank and on two."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.errors import RoutesUnknown
from learner.settings.algorithm import KlConvex, KlPenalty
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from tests.integration.learner.published import assert_weights_close, weights_of
from tests.integration.learner.start_ranks import run_two_ranks
from tests.integration.learner.tiny_mixture import CHOSEN, save_mixture
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.integration.learner.two_ranks import method_batches, method_settings
from tests.methods import method
from tests.trajectories import make_batch_of_groups, make_trajectory, with_routes

SHARE = "learner/rerouted_share"
ONE_STEP = {"routes": "behaviour", "updates_per_batch": 1, "passes": 1}
STEPS = "routes+2x2"
"""Two mini-batches in each of two passes: the second pass deals trajectories anew."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("mixture"), seed=2)


def train(model, *, lr=1e-2, **settings):
    """Return the metrics of one update with four optimizer steps, and the trained weights."""
    algorithm = method(STEPS).model_copy(update=settings.pop("algorithm", {}))
    batch = settings.pop("batch", None) or make_batch_of_groups(3, 4)
    config = LearnerConfig(
        **{"optimizer": OptimizerConfig(lr=lr), "micro_batch_tokens": 40, "max_policy_lag": 4} | settings,
        algorithm=algorithm,
    )
    engine = TrainingEngine(config, model=str(model), total_steps=10, seed=0)
    try:
        report = engine.update(batch, current_version=0)
        assert report.applied
        return report.metrics, weights_of(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def replayed(model):
    return train(model)


def test_replay_acts_after_the_first_step(model, replayed):
    metrics, weights = replayed
    assert 0 < metrics[SHARE] < 0.5
    plain_metrics, plain = train(model, algorithm={"routes": "current"})
    assert SHARE not in plain_metrics
    assert any(not torch.equal(weights[name], plain[name]) for name in plain)
    gates = [name for name in weights if name.endswith("mlp.gate.weight")]
    first = load_file(model / "model.safetensors")
    assert gates
    assert all(not torch.equal(weights[name], first[name]) for name in gates)


def test_without_movement_replay_changes_nothing(model):
    """Weights that do not move choose the same experts in each pass, so no choice differs."""
    metrics, _ = train(model, lr=1e-30)
    assert metrics[SHARE] == 0
    assert metrics["learner/ratio_current_proximal_max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"share_prefixes": False},
        {"micro_batch_tokens": 400},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
    ],
    ids=lambda settings: "=".join(map(str, *settings.items())),
)
def test_how_the_passes_are_computed_does_not_matter(model, replayed, settings):
    metrics, weights = train(model, **settings)
    assert metrics[SHARE] == pytest.approx(replayed[0][SHARE], abs=0.01)
    assert_weights_close(weights, replayed[1], atol=2e-4)


def test_a_single_step_replays_nothing(model):
    metrics, _ = train(model, algorithm={"updates_per_batch": 1, "passes": 1})
    assert SHARE not in metrics


@pytest.fixture(scope="module")
def given(model):
    """Return an update with a single step, all tokens of which have experts that no router would choose."""
    return train(model, algorithm=ONE_STEP, batch=list(map(with_routes, make_batch_of_groups(3, 4))))


def test_given_experts_act_in_a_single_step(model, given):
    metrics, weights = given
    assert 0.3 < metrics[SHARE] < 0.7
    assert 0.7 < metrics[KNOWN] < 0.95
    plain_metrics, plain = train(model, algorithm={**ONE_STEP, "routes": "current"})
    assert KNOWN not in plain_metrics
    assert any(not torch.equal(weights[name], plain[name]) for name in plain)


def test_nothing_given_is_plain_training(model):
    metrics, weights = train(model, algorithm=ONE_STEP)
    assert metrics[KNOWN] == 0
    assert SHARE not in metrics
    _, plain = train(model, algorithm={**ONE_STEP, "routes": "current"})
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"share_prefixes": False},
        {"micro_batch_tokens": 400},
        {"zero_stage": 3},
    ],
    ids=lambda settings: "=".join(map(str, *settings.items())),
)
def test_how_passes_with_given_experts_are_computed_does_not_matter(model, given, settings):
    batch = list(map(with_routes, make_batch_of_groups(3, 4)))
    metrics, weights = train(model, algorithm=ONE_STEP, batch=batch, **settings)
    assert metrics[SHARE] == pytest.approx(given[0][SHARE], abs=0.01)
    assert_weights_close(weights, given[1], atol=2e-4)


def test_a_penalty_on_the_distance_to_equal_weights_changes_nothing(model, given):
    """The reference has the policy's weights in the first step, and computes with the given experts, too."""
    batch = list(map(with_routes, make_batch_of_groups(3, 4)))
    algorithm = {**ONE_STEP, "kl": KlPenalty(to="reference", coefficient=10.0)}
    _, weights = train(model, algorithm=algorithm, batch=batch)
    assert all(torch.equal(weights[name], given[1][name]) for name in weights)


def test_frozen_policies_score_a_batch_as_the_policy_with_equal_weights_does(model):
    algorithm = method(STEPS).model_copy(update={**ONE_STEP, "kl": KlConvex()})
    engine = TrainingEngine(LearnerConfig(algorithm=algorithm), model=str(model), total_steps=10, seed=0)
    try:
        assert engine.route_layers == ([0, 1], CHOSEN)
        updater = engine.updater
        batch = engine._batch(list(map(with_routes, make_batch_of_groups(3, 4))), 0)
        micro_batches = updater._micro_batches(batch, np.arange(len(batch.lengths)))
        updater.routes.begin_batch(len(batch.token_ids), batch.routes)
        with torch.no_grad():
            expected = torch.cat([updater.forward(micro_batch).logp for micro_batch in micro_batches])
        assert updater.frozen.keys() == {"reference", "predecessor"}
        for frozen in updater.frozen.values():
            assert torch.equal(torch.cat(frozen.score(batch, micro_batches)), expected)
    finally:
        engine.close()


def groups_with_rows(equal, missing=()):
    """Return two groups of four, each with one prompt of 12 tokens.

    Args:
        equal: tokens whose experts are the same in a group.
        missing: tokens without experts in every second member.
    """
    found = []
    for group in "ab":
        names = [f"{group}{i}" for i in range(4)]
        members = [
            make_trajectory(name, group=group, prompt=12, reward=len(name) * i)
            for i, name in enumerate(names)
        ]
        first, *_ = members = [with_routes(t) for t in members]
        for i, t in enumerate(members):
            t.token_ids[:12] = first.token_ids[:12]
            shared = t.routed_token < equal
            rows = t.routed_experts.reshape(len(shared), -1)
            rows[shared] = first.routed_experts.reshape(len(shared), -1)[shared]
            rows[shared.sum()] = [0, 1, i, (i + 1) % 4]
            kept = ~np.isin(t.routed_token, missing if i % 2 else ())
            found.append(replace(t, routed_token=t.routed_token[kept], routed_experts=rows[kept].reshape(-1)))
    return found


@pytest.mark.parametrize(
    ("equal", "missing", "saved"),
    # Each member has 16 inputs. Of 3 more members of a group, each saves the tokens that it shares.
    [(12, (), 12 * 3), (0, (), 0), (7, (), 7 * 3), (12, (3,), 3 * 3 + 9 * 2)],
)
def test_members_share_tokens_as_far_as_their_experts_are_equal(model, equal, missing, saved):
    """Two members without the fourth token's experts share the rest, and so do the two others."""
    batch = groups_with_rows(equal, missing)
    settings = {"algorithm": ONE_STEP, "batch": batch, "micro_batch_tokens": 400}
    metrics, weights = train(model, **settings)
    assert metrics["learner/shared_fraction"] == pytest.approx(saved / (4 * 16))
    alone, expected = train(model, share_prefixes=False, **settings)
    assert alone["learner/shared_fraction"] == 0
    # Adam takes the sign of gradients that are rounding only; a wrong expert moves weights by twice the rate, 0.02.
    assert_weights_close(weights, expected, atol=1e-3)


def test_given_experts_of_the_proximal_policy_are_routing_replay(model, replayed):
    """R3 with the experts that the learner's weights choose is R2."""
    lm = AutoModelForCausalLM.from_pretrained(model).float().eval()
    batch = []
    for t in make_batch_of_groups(3, 4):
        with torch.no_grad():
            logits = lm(torch.from_numpy(t.token_ids)[None].long(), output_router_logits=True).router_logits
        rows = torch.stack([layer.topk(CHOSEN).indices for layer in logits], dim=1).numpy().astype(np.uint8)
        every = np.arange(len(t), dtype=np.int32)
        batch.append(replace(t, routed_token=every, routed_experts=rows.reshape(-1)))
    metrics, weights = train(model, algorithm={"routes": "behaviour"}, batch=batch)
    assert metrics[KNOWN] == 1
    # The pass that scores the batch replays, too, and changes nothing: it is one of three over the batch.
    assert metrics[SHARE] == pytest.approx(replayed[0][SHARE] * 2 / 3, abs=0.01)
    assert_weights_close(weights, replayed[1], atol=2e-4)


def test_a_dense_model_is_refused_at_the_start(tmp_path):
    with pytest.raises(RoutesUnknown, match='set it to "current"'):
        train(save(tiny_model(tied=True, seed=0), tmp_path))


GIVEN = "given+2x2"
KNOWN = "learner/routes_known_share"
CASES = {(stage, steps): f"{stage}-float32-{steps}" for steps in (STEPS, GIVEN) for stage in (0, 1, 2, 3)}
CASES = {key: case for key, case in CASES.items() if key[1] == STEPS or key[0] in (0, 3)}


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    """Return the folder with two ranks' results; one start serves all stages."""
    return run_two_ranks(str(model), tmp_path_factory.mktemp("out"), list(CASES.values()), timeout_s=400)


@pytest.fixture(scope="module")
def one_rank(model):
    """Return by method the metrics of two updates on one rank, and the trained weights."""

    def trained(steps):
        settings = LearnerConfig(**method_settings(steps, 1))
        engine = TrainingEngine(settings, model=str(model), total_steps=10, seed=5)
        try:
            metrics = [engine.update(batch, current_version=2).metrics for batch in method_batches(steps)]
            return metrics, weights_of(engine)
        finally:
            engine.close()

    return {steps: trained(steps) for steps in (STEPS, GIVEN)}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_replay_what_either_recorded_or_was_given(two_ranks, one_rank, case):
    """In the second pass a rank trains trajectories whose routes the other rank has recorded."""
    out, (expected, weights) = two_ranks / CASES[case], one_rank[case[1]]
    for metrics, alone in zip(json.loads((out / "result.json").read_text()), expected, strict=True):
        assert metrics[SHARE] == pytest.approx(alone[SHARE], abs=0.01)
        assert metrics.get(KNOWN) == alone.get(KNOWN)
    assert_weights_close(load_file(out / "trained.safetensors"), weights, atol=1e-4)
