"""Every family of models publishes what its folder holds: names, shapes and values, fused, tied or with biases."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from learner.update.policy import load_policy
from learner.update.ranks import gathered_weights, weight_shapes
from protocol.weights.format import check_names, replaced_shapes

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    # Tied embeddings, and biases of queries, keys and values.
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    # Every second layer sees a window only, and the embeddings are tied.
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "mistral": {"sliding_window": 8},
    # One tensor for queries, keys and values, and one for both halves of the feed-forward layer.
    "phi3": {},
    # Transposed layers with biases.
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # Experts, latent attention, and a bias of the routers that is no parameter.
    "deepseek_v3": {**EXPERTS, **LATENT},
    # Experts with biases, in one tensor also in the folder.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_holds_the_tensors_of_the_folder(family, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=torch.float32)
    engine = SimpleNamespace(module=policy, zero_optimization_stage=lambda: 0)
    shapes = weight_shapes(engine)
    check_names(shapes, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    assert list(published) == list(shapes)
    assert published.keys() == replaced_shapes(tmp_path).keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, written[name]), name
