"""Routing replay against a slow twin written from arXiv:2512.01374, and on tiny mixtures of experts.

The paper's equation: g_i = I_i exp(z_i) / sum_j I_j exp(z_j), where I marks the experts of the earlier policy and z are
the router's present logits.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from learner.errors import RoutesUnknown
from learner.update.micro_batches import ON_GPU, make_micro_batches
from learner.update.routed_experts import ForcedRoutes, replayed_weights
from tests.integration.learner.tiny_mixture import CHOSEN, EXPERTS, LAYERS, tiny_mixture
from tests.integration.learner.tiny_qwen3 import tiny_model
from tests.trajectories import batch_of, make_batch_of_groups

CPU = torch.device("cpu")


def twin(logits, routes, *, normalised):
    weights = np.zeros(routes.shape)
    for token, chosen in enumerate(routes):
        summed = sum(np.exp(logits[token, j]) for j in (chosen if normalised else range(logits.shape[1])))
        for k, i in enumerate(chosen):
            weights[token, k] = np.exp(logits[token, i]) / summed
    return weights


def sigmoid_twin(logits, routes, *, normalised):
    """Return weights as DeepSeek V3 forms them (arXiv:2412.19437, equations 13 and 15), for given experts."""
    weights = np.zeros(routes.shape)
    for token, chosen in enumerate(routes):
        affinity = {j: 1 / (1 + np.exp(-logits[token, j])) for j in chosen}
        for k, i in enumerate(chosen):
            weights[token, k] = affinity[i] / (sum(affinity.values()) if normalised else 1)
    return weights


@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_those_of_the_papers(normalised):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(7, 5))
    routes = np.stack([rng.permutation(5)[:2] for _ in range(7)])
    given = torch.from_numpy(logits), torch.from_numpy(routes)
    found = replayed_weights(*given, normalised=normalised)
    np.testing.assert_allclose(found, twin(logits, routes, normalised=normalised), atol=1e-6)
    found = replayed_weights(*given, normalised=normalised, score="sigmoid", scale=2.5)
    np.testing.assert_allclose(found, 2.5 * sigmoid_twin(logits, routes, normalised=normalised), atol=1e-6)


def test_by_hand():
    """z = log(1, 2, 3): experts 0 and 2 have 1/4 and 3/4 of their own sum, and 1/6 and 3/6 of the whole."""
    logits, routes = torch.tensor([[1.0, 2.0, 3.0]]).log(), torch.tensor([[0, 2]])
    assert replayed_weights(logits, routes, normalised=True).tolist() == [pytest.approx([0.25, 0.75])]
    assert replayed_weights(logits, routes, normalised=False).tolist() == [pytest.approx([1 / 6, 0.5])]


def test_a_missing_row_is_refused():
    with pytest.raises(ValueError, match="one row of experts"):
        replayed_weights(torch.zeros(3, 4), torch.zeros(2, 1, dtype=torch.int64), normalised=True)


class Scene:
    """A tiny mixture, its replay, and one micro-batch with all trajectories of a batch."""

    def __init__(self, lm=None) -> None:
        self.lm = tiny_mixture(seed=1) if lm is None else lm
        self.replay = ForcedRoutes(self.lm)
        self.batch = batch_of(make_batch_of_groups(2, 3))
        members = np.arange(len(self.batch.lengths))
        (self.micro_batch,) = make_micro_batches(
            self.batch, members, aggregation="token_mean", budget=4096, rule=ON_GPU
        )

    def logits(self):
        self.replay.force_next_pass(self.micro_batch, CPU)
        ids = torch.from_numpy(self.micro_batch.token_ids)
        logits = self.lm(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        self.replay.record_pass(self.micro_batch)
        return logits[torch.from_numpy(self.micro_batch.position)]

    def recorded(self):
        self.replay.begin_batch(len(self.batch.token_ids))
        logits = self.logits()
        self.replay.end_recording()
        return logits

    def move(self):
        """Turn the routers so that they choose other experts."""
        with torch.no_grad():
            for layer in self.lm.model.layers:
                layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))


def test_replay_of_the_routes_that_the_model_would_take_anyway_changes_no_bit():
    scene = Scene()
    plain = scene.logits()
    assert torch.equal(scene.recorded(), plain)
    assert torch.equal(scene.logits(), plain)
    replayed, changed, *_ = scene.replay.end_batch().tolist()
    assert (replayed, changed) == (len(scene.micro_batch.input_place) * LAYERS * CHOSEN, 0)


def test_moved_routers_still_lead_to_the_experts_of_before():
    scene = Scene()
    scene.recorded()
    scene.move()
    replayed = scene.logits()
    total, changed, *_ = scene.replay.end_batch().tolist()
    plain = scene.logits()
    assert 0.1 < changed / total < 1
    assert (replayed - plain).abs().max() > 0.1
    assert torch.equal(scene.logits(), plain), "nothing is replayed when the batch is done"


def test_a_layer_computes_the_sum_of_the_paper():
    scene = Scene()
    scene.recorded()
    scene.move()
    layer, ids = scene.lm.model.layers[0].mlp, scene.micro_batch.token_ids
    states = torch.randn(*ids.shape, 64, generator=torch.Generator().manual_seed(3))
    scene.replay.force_next_pass(scene.micro_batch, CPU)
    with torch.no_grad():
        found = layer(states).flatten(0, 1)
    routes = scene.replay._forced[0].numpy()
    logits = (states.flatten(0, 1) @ layer.gate.weight.T).detach().numpy()
    weights = twin(logits, routes, normalised=True)
    for place in scene.micro_batch.input_place:
        state, expected = states.flatten(0, 1)[place], torch.zeros(64)
        for weight, expert in zip(weights[place], routes[place], strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ state).chunk(2)
            expected += weight * (layer.experts.down_proj[expert] @ (functional.silu(gate) * up))
        torch.testing.assert_close(found[place], expected.detach(), atol=1e-5, rtol=1e-4)


def test_gradient_reaches_the_routers_through_experts_that_they_do_not_choose_any_more():
    scene = Scene()
    scene.recorded()
    scene.move()
    scene.logits().logsumexp(-1).sum().backward()
    for layer in scene.lm.model.layers:
        assert layer.mlp.gate.weight.grad.abs().max() > 1e-3
    assert EXPERTS > CHOSEN, "otherwise there would be nothing to choose"


SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip


LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8,
}  # fmt: skip
DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 0}
SOFTMAX, SIGMOID = ("softmax", True, 1.0), ("sigmoid", True, 2.5)
FAMILIES = {
    "qwen2_moe": ({"num_experts": 4, "shared_expert_intermediate_size": 32}, ("softmax", False, 1.0)),
    "mixtral": ({"num_local_experts": 4}, SOFTMAX),
    "olmoe": ({"num_experts": 4}, ("softmax", False, 1.0)),
    "qwen3_moe": ({"num_experts": 4, "norm_topk_prob": True}, SOFTMAX),
    "deepseek_v2": (LATENT | DEEPSEEK | {"routed_scaling_factor": 2.5}, ("softmax", False, 2.5)),
    "deepseek_v3": (LATENT | DEEPSEEK | {"routed_scaling_factor": 2.5}, SIGMOID),
    "glm4_moe": ({"head_dim": 16} | DEEPSEEK | {"routed_scaling_factor": 2.5}, SIGMOID),
    "minimax_m2": ({"head_dim": 16, "num_local_experts": 4}, ("sigmoid", True, 1.0)),
    # These two weigh the logits of the chosen experts, so the last bits may differ.
    "gpt_oss": ({"head_dim": 16, "num_local_experts": 4}, SOFTMAX),
    "granitemoe": ({"num_local_experts": 4}, SOFTMAX),
}
ROUNDED = ("gpt_oss", "granitemoe")


def model_of(family):
    torch.manual_seed(0)
    settings = SIZES | {"initializer_range": 0.2} | FAMILIES[family][0]
    config = AutoConfig.for_model(family, **settings, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_understood(family):
    scene = Scene(model_of(family))
    for router in scene.replay._routers:
        way = router.weigh.keywords
        assert (way["score"], way["normalised"], way["scale"]) == FAMILIES[family][1]
    plain = scene.recorded()
    torch.testing.assert_close(scene.logits(), plain, rtol=0, atol=1e-5 if family in ROUNDED else 0)
    with torch.no_grad():
        for router in scene.replay._routers:
            router.module.weight.copy_(router.module.weight.flip(0))
    scene.logits()
    replayed, changed, *_ = scene.replay.end_batch().tolist()
    assert 0 < changed < replayed


def test_a_family_that_weighs_by_neither_is_refused():
    """Phi-3.5-MoE masks logits that are far from the largest one before its softmax."""
    config = AutoConfig.for_model("phimoe", **SIZES, num_local_experts=4, pad_token_id=0)
    with pytest.raises(RoutesUnknown, match="does not weigh experts by a softmax or sigmoid"):
        ForcedRoutes(AutoModelForCausalLM.from_config(config).float().eval())


def test_routers_that_tell_nothing_are_refused():
    """Where all logits are 0, softmax and sigmoid give equal weights, and would differ after the first step."""
    lm = tiny_mixture(seed=1)
    with torch.no_grad():
        lm.model.layers[1].mlp.gate.weight.zero_()
    with pytest.raises(RoutesUnknown, match=r"layers\.1\.mlp\.gate gives all experts equal numbers"):
        ForcedRoutes(lm)


def test_a_dense_model_is_refused():
    with pytest.raises(RoutesUnknown, match="no layer of the model is known to choose experts"):
        ForcedRoutes(tiny_model(tied=True, seed=0))


def test_a_router_that_weighs_otherwise_is_refused():
    lm = tiny_mixture(seed=1)
    gate = lm.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda _module, _inputs, output: (output[0], output[1].square(), output[2]))
    with pytest.raises(RoutesUnknown, match=r"model.layers.1.mlp.gate does not weigh experts by a softmax"):
        ForcedRoutes(lm)
