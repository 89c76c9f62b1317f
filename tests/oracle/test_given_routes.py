"""Replay of experts that the generators chose (R3, arXiv:2510.11370), on tiny mixtures of experts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from learner.errors import RoutesUnknown
from learner.update.batch import BatchRoutes
from learner.update.micro_batches import ON_GPU, make_micro_batches
from learner.update.routed_experts import ForcedRoutes
from tests.integration.learner.tiny_mixture import CHOSEN, EXPERTS, LAYERS, tiny_mixture
from tests.oracle.test_routing_replay import CPU, twin
from tests.trajectories import batch_of, make_batch_of_groups, with_routes


class Scene:
    """A tiny mixture, its replay of given experts, and one micro-batch with all trajectories of a batch."""

    def __init__(self, trajectories) -> None:
        self.lm = tiny_mixture(seed=1)
        self.replay = ForcedRoutes(self.lm, "behaviour")
        self.batch = batch_of(trajectories)
        (self.micro_batch,) = make_micro_batches(
            self.batch, np.arange(len(trajectories)), aggregation="token_mean", budget=4096, rule=ON_GPU
        )

    def logits(self):
        """Return the logits of all inputs, [inputs, V]."""
        self.replay.force_next_pass(self.micro_batch, CPU)
        logits = self.lm(input_ids=torch.from_numpy(self.micro_batch.token_ids), use_cache=False).logits
        self.replay.record_pass(self.micro_batch)
        return logits.flatten(0, 1)[torch.from_numpy(self.micro_batch.input_place)]

    def given(self, routes="own"):
        self.replay.begin_batch(len(self.batch.token_ids), self.batch.routes if routes == "own" else routes)
        return self.logits()

    def choices(self):
        """Return the experts that the routers choose by themselves, [tokens of the batch, layers, K]."""
        ids = torch.from_numpy(self.micro_batch.token_ids)
        with torch.no_grad():
            logits = self.lm(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
        own = torch.stack([layer.topk(CHOSEN).indices for layer in logits], dim=1).numpy()
        table = np.zeros((len(self.batch.token_ids), LAYERS, CHOSEN), np.uint8)
        table[self.micro_batch.input_token] = own[self.micro_batch.input_place]
        return table


@pytest.fixture
def scene():
    return Scene([with_routes(t) for t in make_batch_of_groups(2, 3)])


def inputs(scene):
    """Return the tokens that are inputs, each once."""
    return np.unique(scene.micro_batch.input_token).astype(np.int32)


def test_experts_that_the_routers_would_choose_anyway_change_no_bit(scene):
    plain, tokens = scene.logits(), inputs(scene)
    known = tokens[tokens % 3 != 0]
    found = scene.given(BatchRoutes(known, scene.choices()[known].reshape(-1)))
    assert torch.equal(found, plain)
    assert scene.replay.end_batch().tolist() == [len(known) * LAYERS * CHOSEN, 0, len(known), len(tokens)]


def test_without_rows_the_routers_choose(scene):
    plain = scene.logits()
    assert torch.equal(scene.given(None), plain)
    assert scene.replay.end_batch().tolist() == [0, 0, 0, len(inputs(scene))]


def test_a_layer_computes_the_papers_sum_with_given_experts_and_its_own_where_none_is_given(scene):
    scene.given()
    layer, ids = scene.lm.model.layers[1].mlp, scene.micro_batch.token_ids
    states = torch.randn(*ids.shape, 64, generator=torch.Generator().manual_seed(3))
    scene.replay.end_batch()
    with torch.no_grad():
        plain = layer(states).flatten(0, 1)
    scene.replay.begin_batch(len(scene.batch.token_ids), scene.batch.routes)
    scene.replay.force_next_pass(scene.micro_batch, CPU)
    with torch.no_grad():
        found = layer(states).flatten(0, 1)
    rows = scene.batch.routes.experts.reshape(-1, LAYERS, CHOSEN)[:, 1]
    given = dict(zip(scene.batch.routes.token.tolist(), rows, strict=True))
    unknown = 0
    pairs = zip(scene.micro_batch.input_token.tolist(), scene.micro_batch.input_place.tolist(), strict=True)
    for token, place in pairs:
        if token not in given:
            assert torch.equal(found[place], plain[place])
            unknown += 1
            continue
        state, expected = states.flatten(0, 1)[place], torch.zeros(64)
        logits = (state @ layer.gate.weight.T).detach().numpy()[None]
        weights = twin(logits, given[token][None].astype(np.int64), normalised=True)[0]
        for weight, expert in zip(weights, given[token], strict=True):
            gate, up = (layer.experts.gate_up_proj[int(expert)] @ state).chunk(2)
            expected += weight * (layer.experts.down_proj[int(expert)] @ (functional.silu(gate) * up))
        torch.testing.assert_close(found[place], expected.detach(), atol=1e-5, rtol=1e-4)
    assert 0 < unknown < len(given)


def test_gradient_reaches_the_routers_and_no_expert_that_was_not_given():
    """All tokens went through experts 1 and 3."""
    trajectories = make_batch_of_groups(1, 3)
    one = np.array([1, 3] * LAYERS, np.uint8)
    trajectories = [
        replace(t, routed_token=np.arange(len(t), dtype=np.int32), routed_experts=np.tile(one, len(t)))
        for t in trajectories
    ]
    scene = Scene(trajectories)
    scene.given().logsumexp(-1).sum().backward()
    for layer in scene.lm.model.layers:
        assert layer.mlp.gate.weight.grad.abs().max() > 1e-3
        reached = layer.mlp.experts.down_proj.grad.abs().amax(dim=(1, 2)) > 0
        # Padding goes through the first experts and carries no gradient.
        assert reached.tolist() == [expert in (1, 3) for expert in range(EXPERTS)]


def test_dense_layers_have_numbers_that_nobody_reads(scene):
    """The generator counts all layers; here the learner's routers are those of layers 0 and 2 of three."""
    rows = scene.batch.routes.experts.reshape(-1, LAYERS, CHOSEN)
    plain = scene.given()
    scene.replay._layers = [0, 2]
    wide = np.stack([rows[:, 0], np.full_like(rows[:, 0], 99), rows[:, 1]], axis=1)
    assert torch.equal(scene.given(BatchRoutes(scene.batch.routes.token, wide.reshape(-1))), plain)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (
            np.zeros(3, np.uint8),
            "sent 3 experts for a token, and this model needs 2 for each of at least 2 layers",
        ),
        (np.zeros(2, np.uint8), "sent 2 experts"),
        (np.array([0, 1, 4, 2], np.uint8), r"sent expert 4 of model\.layers\.1\.mlp\.gate, which has 4"),
    ],
)
def test_experts_of_another_model_are_refused(scene, experts, words):
    with pytest.raises(RoutesUnknown, match=words):
        scene.given(BatchRoutes(np.zeros(1, np.int32), experts))


def test_routers_without_a_number_are_refused(monkeypatch):
    from learner.update.routed_experts import Router

    monkeypatch.setattr(Router, "layer", property(lambda self: 0))
    with pytest.raises(RoutesUnknown, match=r"model\.layers\.0\.mlp\.gate, .* do not tell which layer"):
        ForcedRoutes(tiny_mixture(seed=1), "behaviour")
