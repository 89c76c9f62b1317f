"""Trained tokens per second of `Engine.update`, against a bare PyTorch loop with the same passes.

    python -m benchmarks.learner_update [--lengths short|long] [--zero-stage 1] [--rounds 10]

The two take turns, and the best time of each counts, so that other work on the machine disturbs both alike.
The bare loop uses the same micro-batches and loss, the model's own forward with logits at all positions, and
AdamW; it reports nothing.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from learner.batching import MicroBatch, make_batch, make_micro_batches
from learner.config import LearnerConfig
from learner.credit import assign_credit
from learner.engine import Engine
from learner.trajectory import Trajectory
from protocol.messages import Reward, Turn

VOCABULARY = 128


def make_model(folder: Path) -> None:
    """A random Qwen3 of about 1.2 million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, intermediate_size=448, max_position_embeddings=1024,
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)


def make_trajectories(lengths: str, count: int = 128) -> list[Trajectory]:
    """Prompts of about 25 tokens, answers of about 10, or with a long tail up to 400."""
    rng = np.random.default_rng(0)
    result = []
    for i in range(count):
        prompt = int(rng.integers(22, 29))
        answer = int(rng.integers(6, 15)) if lengths == "short" else int(min(400, 8 + rng.pareto(1.1) * 10))
        total = prompt + answer
        mask = np.arange(total) >= prompt
        result.append(
            Trajectory(
                trajectory_id=f"t{i}",
                group_id=f"g{i // 8}",
                group_size=8,
                env="benchmark",
                status="finished",
                purpose="train",
                token_ids=rng.integers(0, VOCABULARY, total).astype(np.int32),
                action_mask=mask,
                logp_behaviour=np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32),
                policy_version=np.where(mask, 0, -1).astype(np.int32),
                turns=[Turn(0, 0, prompt, False), Turn(1, prompt, total, True)],
                rewards=[Reward("score", 1, float(rng.random()))],
            )
        )
    return result


def bare_step(model: Any, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]) -> None:
    """One optimizer step without any of our machinery."""
    optimizer.zero_grad()
    for m in micro_batches:
        logits = model(input_ids=torch.from_numpy(m.token_ids), use_cache=False).logits
        logp_all = logits.float().log_softmax(-1).flatten(0, 1)[torch.from_numpy(m.position)]
        logp = logp_all.gather(1, torch.from_numpy(m.target)[:, None])[:, 0]
        ratio = (logp - logp.detach()).exp()
        advantage = torch.from_numpy(m.columns["advantage"])
        weight = (logp.detach() - torch.from_numpy(m.columns["logp_behaviour"])).exp().clamp(max=2.0)
        objective = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-(objective * torch.from_numpy(m.columns["weight"])).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", choices=["short", "long"], default="short")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(Path(name), arguments.lengths, arguments.zero_stage, arguments.rounds)))


def measure(folder: Path, lengths: str, zero_stage: int, rounds: int) -> dict[str, float | int | str]:
    make_model(folder)
    trajectories = make_trajectories(lengths)
    config = LearnerConfig.model_validate({"zero_stage": zero_stage})
    engine = Engine(config, model=str(folder), total_steps=1000, seed=0)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bare.train()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-4, fused=True)
    credit = assign_credit(config.algorithm, trajectories)
    batch = make_batch(trajectories, credit, current_version=0, max_policy_lag=0)
    micro_batches = make_micro_batches(
        batch,
        np.arange(len(trajectories)),
        aggregation=config.algorithm.aggregation,
        budget=config.micro_batch_tokens,
    )
    ours, theirs = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        report = engine.update(trajectories, current_version=0)
        ours.append(time.perf_counter() - started)
        started = time.perf_counter()
        bare_step(bare, optimizer, micro_batches)
        theirs.append(time.perf_counter() - started)
    engine.close()
    return {
        "lengths": lengths,
        "zero_stage": zero_stage,
        "trained_tokens": int(batch.trained.sum()),
        "tokens": int(batch.lengths.sum()),
        "micro_batches": len(micro_batches),
        "padding_fraction": round(report.metrics["learner/padding_fraction"], 4),
        "update_seconds": round(min(ours), 4),
        "bare_seconds": round(min(theirs), 4),
        "trained_tokens_per_second": round(int(batch.trained.sum()) / min(ours)),
        "share_of_bare": round(min(theirs) / min(ours), 3),
    }


if __name__ == "__main__":
    main()
