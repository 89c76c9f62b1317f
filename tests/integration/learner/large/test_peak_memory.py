"""What `offbeat check` estimates for a rank of the learner on a CPU is what a rank takes."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from launch.preflight.memory import GB, model_size, shares, version_bytes, versions_at_once
from launch.run_file.load import check
from tests.integration.learner.start_ranks import COMMAND

PROGRAM = Path(__file__).with_name("peak_memory.py")
TOKENS = 64
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a model of 41 million parameters, beside which libraries and buffers are small."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("stage", "dtype"), [(3, "bfloat16"), pytest.param(2, "bfloat16", marks=pytest.mark.soak)]
)
def test_two_ranks_take_what_is_estimated(model, tmp_path, stage, dtype):
    subprocess.run(
        [*COMMAND, str(PROGRAM), str(model), str(tmp_path), str(stage), dtype],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_S - 60,
        check=True,
    )
    learner = {"processes": 2, "zero_stage": stage, "dtype": dtype}
    config = check({"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": learner}, "a test")
    size = model_size(model)
    estimated = shares(config, size, tokens=TOKENS)[0].each_gb
    # The program publishes no version.
    estimated -= versions_at_once(config) * version_bytes(config, size) / 2 / GB
    taken = [int((tmp_path / str(rank)).read_text()) / GB for rank in range(2)]
    assert max(taken) < estimated
    assert max(taken) > 0.6 * estimated
