"""Random Qwen3 mixtures of experts, so sharp that a wrong expert shows in every log-probability."""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.integration.learner.tiny_qwen3 import EOS, VOCAB

EXPERTS = 4
CHOSEN = 2
LAYERS = 2


def tiny_mixture(*, seed: int, expert_width: int = 32) -> Qwen3MoeForCausalLM:
    """Return a mixture in float32: each token chooses 2 of 4 experts in each of 2 layers."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=expert_width,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).float().eval()


def save_mixture(folder: Path, *, seed: int, expert_width: int = 32) -> Path:
    """Write a mixture as a model folder, which has a tensor for each expert."""
    tiny_mixture(seed=seed, expert_width=expert_width).save_pretrained(folder)
    return folder
