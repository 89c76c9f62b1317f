"""Adapters against plain matrices: what they compute, their gradients, what is merged, and what is refused."""

import copy
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from learner.errors import LoraError
from learner.settings.learner import LoraConfig
from learner.update.lora import (
    adapters,
    add_adapters,
    chosen_layers,
    count_parameters,
    frozen_digest,
    published_name,
)
from learner.update.policy import load_policy
from tests.integration.learner.tiny_qwen3 import VOCAB, tiny_model

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_gpt2():
    """Return a model whose layers hold their weights as [inputs, outputs], and have a bias."""
    torch.manual_seed(2)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).float().eval()


MODELS = {
    "qwen3": lambda: tiny_model(tied=True, seed=3),
    "qwen3_untied": lambda: tiny_model(tied=False, seed=3),
    "gpt2": tiny_gpt2,
}


def adapted(lm, *, seed=0, **settings):
    """Return a copy of the model with adapters that do something."""
    changed = copy.deepcopy(lm)
    add_adapters(changed, LoraConfig(**{"rank": 4} | settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for adapter in adapters(changed).values():
            adapter.up.normal_(std=0.05, generator=generator)
    return changed


def merged(lm):
    """Return the weights of the model without adapters, each with what its adapter adds."""
    own, by_name = dict(lm.named_parameters()), adapters(lm)
    parts = {id(part) for adapter in by_name.values() for part in (adapter.down, adapter.up)}
    return {
        published_name(name): by_name[name].merged(tensor) if name in by_name else tensor.detach()
        for name, tensor in own.items()
        if id(tensor) not in parts
    }


@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_compute_what_the_adapters_compute(kind):
    base = MODELS[kind]()
    changed = adapted(base, alpha=6.0)
    plain = copy.deepcopy(base)
    missing = plain.load_state_dict(merged(changed), strict=False)
    assert missing.unexpected_keys == []
    with torch.no_grad():
        expected, found, before = (model(IDS).logits for model in (changed, plain, base))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert (expected - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_the_factors_follow_from_the_gradient_of_the_weight(kind):
    """With W' = W + s B A and G = dL/dW', the chain rule gives dL/dB = s G Aᵀ and dL/dA = s Bᵀ G."""
    base = MODELS[kind]()
    changed = adapted(base, rank=3, alpha=6.0)
    plain = copy.deepcopy(base)
    plain.load_state_dict(merged(changed), strict=False)
    for model in (changed, plain):
        model(IDS, labels=IDS).loss.backward()
    full = {name: p.grad for name, p in plain.named_parameters()}
    assert len(adapters(changed)) == (14 if kind != "gpt2" else 8)
    for name, adapter in adapters(changed).items():
        gradient = full[published_name(name)]
        if adapter.transposed:
            gradient = gradient.T
        expected = {"up": 2.0 * gradient @ adapter.down.T, "down": 2.0 * adapter.up.T @ gradient}
        for factor, value in expected.items():
            found = getattr(adapter, factor).grad
            torch.testing.assert_close(
                found, value, atol=1e-5, rtol=1e-3, msg=lambda m, n=f"{name}.{factor}": f"{n}: {m}"
            )


@pytest.mark.parametrize("kind", MODELS)
def test_new_adapters_change_no_bit_of_the_model(kind):
    base = MODELS[kind]()
    with torch.no_grad():
        # A sum with +0 would lose the sign.
        next(iter(base.parameters())).view(-1)[0] = -0.0
        for layer in base.modules():
            if hasattr(layer, "weight") and layer.weight.dim() == 2:
                layer.weight.view(-1)[1] = -0.0
    changed = copy.deepcopy(base)
    add_adapters(changed, LoraConfig(rank=4))
    with torch.no_grad():
        assert torch.equal(changed(IDS).logits, base(IDS).logits)
    found = merged(changed)
    assert found.keys() == dict(base.named_parameters()).keys()
    for name, tensor in base.named_parameters():
        assert torch.equal(found[name].view(torch.int32), tensor.detach().view(torch.int32)), name


def test_only_the_factors_are_trained():
    base = tiny_model(tied=True, seed=3)
    count = count_parameters(base)
    assert count.trained == count.whole
    changed = adapted(base, rank=4, targets=["q_proj", "down_proj"])
    # Two layers, with rows + columns of 128 + 128 and 128 + 192.
    assert count_parameters(changed).trained == 2 * 4 * ((128 + 128) + (128 + 192))
    assert count_parameters(changed).whole == count.whole + count_parameters(changed).trained
    trained = {id(p) for p in changed.parameters() if p.requires_grad}
    assert trained == {id(p) for a in adapters(changed).values() for p in (a.down, a.up)}


def test_default_targets_are_all_linear_layers_but_the_output():
    for tied in (True, False):
        chosen = chosen_layers(tiny_model(tied=tied, seed=1), LoraConfig())
        assert {path.rpartition(".")[2] for path in chosen} == set(PROJECTIONS)
        assert len(chosen) == 2 * len(PROJECTIONS)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("v_proj", ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]),
        (["1.mlp.up_proj", "lm_head"], ["model.layers.1.mlp.up_proj", "lm_head"]),
    ],
)
def test_a_target_is_the_end_of_a_path(targets, expected):
    assert chosen_layers(tiny_model(tied=False, seed=1), LoraConfig(targets=targets)) == expected


def test_exactly_the_chosen_layers_get_an_adapter():
    lm = tiny_model(tied=True, seed=1)
    # A path with a letter that means something else in a regular expression, and one that ends like a chosen one.
    lm.also = torch.nn.ModuleDict({"qXproj": torch.nn.Linear(4, 4), "q_proj": torch.nn.Embedding(4, 4)})
    config = LoraConfig(rank=2, targets=["q_proj"])
    chosen = chosen_layers(lm, config)
    add_adapters(lm, config)
    assert set(adapters(lm)) == {f"{path}.base_layer.weight" for path in chosen}
    assert len(chosen) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"targets": ["q_proj", "query"]},
            r"learner\.lora\.targets has 'query', which no linear layer .* there are: q_proj, k_proj, .*lm_head$",
        ),
        ({"targets": ["proj"]}, "'proj', which no linear layer"),
        ({"targets": ["embed_tokens"]}, "'embed_tokens', which no linear layer"),
        (
            {"rank": 65},
            r"rank is 65, .*k_proj is 64 x 128, so its rank is at most 64; lower learner\.lora\.rank",
        ),
        (
            {"targets": ["lm_head"]},
            r"has lm_head, whose weight is also model\.embed_tokens\.weight: .*take it out",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_the_cure(settings, sentence):
    lm = tiny_model(tied=True, seed=1)
    before = [name for name, _ in lm.named_parameters()]
    with pytest.raises(LoraError, match=sentence):
        add_adapters(lm, LoraConfig(**{"rank": 4} | settings))
    assert [name for name, _ in lm.named_parameters()] == before


def test_a_rank_as_large_as_the_layer_is_allowed():
    assert chosen_layers(tiny_model(tied=True, seed=1), LoraConfig(rank=64, targets=["k_proj"]))


def test_without_peft_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LoraError, match=r"needs the package peft, .*run: pip install '\.\[learner,lora\]'"):
        add_adapters(tiny_model(tied=True, seed=1), LoraConfig())


def test_in_bfloat16_the_sum_is_rounded_once():
    base = tiny_model(tied=True, seed=3).to(torch.bfloat16)
    changed = adapted(base)
    for name, adapter in adapters(changed).items():
        weight = changed.get_parameter(name)
        assert {weight.dtype, adapter.down.dtype, adapter.up.dtype} == {torch.bfloat16}
        exact = weight.double() + 2.0 * adapter.up.double() @ adapter.down.double()
        error = (adapter.merged(weight).double() - exact).abs()
        # Half a unit in the last of bfloat16's eight digits, and what float32 rounds.
        assert (error <= exact.abs() * (2**-8 + 1e-5) + 1e-6).all(), name


def test_the_hash_is_of_frozen_weights_only():
    base = tiny_model(tied=True, seed=3)
    assert frozen_digest(base) == ""
    one, other = adapted(base, seed=1), adapted(base, seed=2)
    assert frozen_digest(one) == frozen_digest(other) != ""
    with torch.no_grad():
        one.model.norm.weight[0] += 1e-6
    assert frozen_digest(one) != frozen_digest(other)


def test_a_policy_with_adapters_has_its_head_trained_whole(tmp_path):
    tiny_model(tied=True, seed=3).save_pretrained(tmp_path)
    policy = load_policy(
        str(tmp_path), dtype=torch.float32, value_head=True, lora=LoraConfig(rank=2, targets=["v_proj"])
    )
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert {"value_head.weight", "value_head.bias"} < trained
    assert len(trained) == 2 + 2 * 2
    policy.find_shortcuts()
    assert policy.sharing == 128
