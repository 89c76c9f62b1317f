"""`offbeat check` tries whether vLLM can load the model, before a generator does."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from launch.errors import ConfigError
from launch.preflight.engine_trial import try_engine
from launch.run_file.load import check
from tests.integration.learner.tiny_qwen3 import save, tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def config():
    made = {
        "model": {"path": "some/model"},
        "env": {"name": "calculator"},
        "generator": {"max_model_len": 256},
    }
    return check(made, "run.toml")


def test_a_model_that_vllm_knows_is_taken(config, tmp_path):
    assert try_engine(config, save(tiny_model(tied=True, seed=1), tmp_path / "model")) == []


def test_a_model_that_vllm_does_not_know_is_refused_with_the_cause(config, tmp_path):
    described = AutoConfig.for_model(
        "openai-gpt", vocab_size=48, n_embd=64, n_layer=1, n_head=2, n_positions=512
    )
    AutoModelForCausalLM.from_config(described).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refused:
        try_engine(config, tmp_path)
    said = str(refused.value)
    assert said.startswith(f"model.path: vLLM cannot load the model {tmp_path}: ")
    assert "Model architectures ['OpenAIGPTLMHeadModel'] are not supported" in said
    assert len(said) < 700, "without the names of all architectures"


def test_servers_of_others_and_hosts_without_generators_try_nothing(config, tmp_path):
    served = config.model_copy(update={"generator": config.generator.model_copy(update={"backend": "http"})})
    assert try_engine(served, tmp_path) == []
    assert try_engine(config, None) == []
