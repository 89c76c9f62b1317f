"""Experts travel from vLLM through actor and broker to the learner, which replays them, in the real system."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.envs.letters import LetterSuite
from launch.model import make_tokenizer, save_tokenizer

pytestmark = pytest.mark.timeout(600)
LENGTH = 64


@pytest.fixture
def mixture(tmp_path):
    """Return a folder with a random mixture: three layers, of which the first has no experts."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    suite = LetterSuite()
    texts = [message["content"] for index in range(4) for message in suite.demonstration(index, "train")]
    save_tokenizer(make_tokenizer(texts), folder, max_length=LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def test_the_learner_replays_what_the_generators_chose(offbeat, mixture):
    """In lockstep, in float32, routers of the learner choose what those of the generator chose, but for rounding."""
    run = offbeat(
        "../tests/gpu/letters",
        f"model.path={mixture}",
        "run.mode=sync",
        "generator.dtype=float32",
        "learner.dtype=float32",
        "learner.steps=3",
        "learner.optimizer.lr=1e-3",
        "learner.algorithm.routes=behaviour",
        "learner.algorithm.updates_per_batch=2",
    )
    assert len(run.steps) == 3
    for step in run.steps:
        # Every input token has a row: the last token of an answer is no input.
        assert step["learner/routes_known_share"] == 1
        assert step["learner/ratio_proximal_behaviour_min"] == pytest.approx(1.0, abs=1e-3)
        assert step["learner/ratio_proximal_behaviour_max"] == pytest.approx(1.0, abs=1e-3)
        # The second optimizer step of a batch has moved routers.
        assert 0 < step["learner/rerouted_share"] < 0.2


@pytest.mark.soak
def test_answers_that_an_update_cut_in_two_keep_the_experts_of_each_half(offbeat, mixture):
    run = offbeat(
        "../tests/gpu/letters",
        f"model.path={mixture}",
        "generator.dtype=float32",
        "learner.dtype=float32",
        "learner.steps=6",
        "learner.optimizer.lr=1e-3",
        "learner.algorithm.routes=behaviour",
        "generator.stream_interval=4",
        "actor.segment_tokens=8",
    )
    assert len(run.steps) == 6
    assert all(step["learner/routes_known_share"] == 1 for step in run.steps)
    assert max(step["learner/policy_lag_max_versions"] for step in run.steps) > 0
