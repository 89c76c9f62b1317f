"""The learner computes what generators sample from: tiny random models of many architectures, in whole runs."""

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from launch.model import make_tokenizer, save_tokenizer

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Architectures with what their own code has and others have not. Head sizes are those of vLLM's CPU attention.
ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": True},
    "qwen3_moe": EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "gemma2": {"head_dim": 32, "attn_logit_softcapping": 2.0, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "phi3": {"pad_token_id": 0},
    "mistral": {"sliding_window": 16, "head_dim": 32},
    "gpt_neox": {"rotary_pct": 1.0},
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
    },
    "olmo2": {},
    "smollm3": {},
    "cohere": {"logit_scale": 0.5},
}  # fmt: skip
IN_EVERY_RUN = ("gemma2", "qwen3_moe", "mistral")
LAYERS, BEYOND = 4, 37
"""Layers of the models, and ids that they have beyond those of the tokenizer."""
ROUNDING = 2e-4
"""Most by which a probability of the learner may differ from the generator's in float32, as a ratio."""


def write_model(kind, folder):
    """Write a random model with some 200,000 parameters whose policy is far from uniform."""
    import torch

    torch.manual_seed(7)
    tokenizer = make_tokenizer([string.ascii_letters, string.digits, string.punctuation])
    save_tokenizer(tokenizer, folder, max_length=256)
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": tokenizer.get_vocab_size() + BEYOND,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4 if kind == "gpt_neox" else 2,
            "max_position_embeddings": 512,
            "bos_token_id": tokenizer.token_to_id("<bos>"),
            "eos_token_id": tokenizer.token_to_id("<eos>"),
            "pad_token_id": tokenizer.token_to_id("<pad>"),
            "initializer_range": 0.15,
        }
        | ARCHITECTURES[kind],
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def write_job(kind, folder, **learner):
    write_model(kind, folder / "model")
    rows = [
        {"prompt": f"Say something about {word}."}
        for word in ("trees", "rain", "ships", "bread", "snow", "glass")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def parity(answer, row):\n    return float(sum(map(ord, answer)) % 5) / 4\n"
    )
    settings = "".join(f"{key} = {value}\n" for key, value in learner.items())
    (folder / "job.toml").write_text(f"""
[run]
dir = "{folder}/runs"
name = "run"
mode = "sync"
max_minutes = 5.0
[model]
path = "{folder}/model"
[env]
name = "rows"
[env.params]
train = "rows.jsonl"
reward = "reward.py:parity"
[generator]
max_model_len = 128
kv_cache_mb = 64
max_num_seqs = 16
[actor]
count = 1
[learner]
steps = 2
group_size = 4
batch_trajectories = 16
evaluation_tasks = 0
{settings}
[learner.sampling]
max_turn_tokens = 40
max_trajectory_tokens = 100
""")
    return folder / "job.toml"


def train(job):
    command = [sys.executable, "-m", "launch.cli", "train", str(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    logs = "".join(f"\n--- {p.name}\n{p.read_text()[-4000:]}" for p in job.parent.glob("runs/run/logs/*.log"))
    return done, done.stdout + done.stderr + logs


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in IN_EVERY_RUN else pytest.mark.soak) for k in ARCHITECTURES]
)
def test_two_updates_of_a_tiny_model(kind, tmp_path):
    done, output = train(write_job(kind, tmp_path))
    assert done.returncode == 0, output
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    steps = [m for m in map(json.loads, lines) if "learner/policy_version" in m]
    assert len(steps) == 2
    for step in steps:
        assert step["learner/ratio_proximal_behaviour_min"] == pytest.approx(1.0, abs=ROUNDING), kind
        assert step["learner/ratio_proximal_behaviour_max"] == pytest.approx(1.0, abs=ROUNDING), kind
    learner = (tmp_path / "runs/run/logs/learner.log").read_text()
    said = [line for line in learner.splitlines() if "nats apart in the mean" in line]
    assert len(said) == 1, output


def test_a_run_whose_generators_sample_from_another_policy_is_refused(tmp_path):
    # A limit below what rounding makes: the two sides differ by some 1e-6 nats.
    job = write_job("mistral", tmp_path, sampler_gap="1e-9")
    done, output = train(job)
    assert done.returncode == 65, output
    assert "the generators sample from another policy than the learner computes" in output
    assert "set learner.sampler_gap to the mean in nats" in output
    folder = tmp_path / "runs/run"
    assert not (folder / "model").exists()
    assert not (folder / "published.json").exists(), "nothing of the refused update left the learner"
    assert not list((folder / "checkpoints").glob("step*"))
