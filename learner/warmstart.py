"""Makes an initial policy without a model hub: a small random model, trained on the form of the answers."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Example = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and a mask of the tokens to learn. The first is never learnt, because nothing predicts it."""

VALIDATE_EVERY = 5
VALIDATION_ROWS = 256


def make_tiny_model(
    folder: Path,
    tokenizer_files: Sequence[Path],
    *,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    head_dim: int = 32,
    intermediate_size: int = 384,
    max_positions: int = 1024,
    rope_theta: float = 10_000.0,
    tied: bool = True,
    seed: int = 0,
) -> None:
    """Write a random Qwen3 model, in float32, for a tokenizer.

    Args:
        folder: folder that the model and the tokenizer's files are written to.
        tokenizer_files: files of a Hugging Face tokenizer; the model takes its vocabulary size and special
            tokens.
        max_positions: longest text, in tokens.
        tied: whether one matrix is both input and output embedding.
    """
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer_files:
        if path.resolve() != (folder / path.name).resolve():
            shutil.copyfile(path, folder / path.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).float().save_pretrained(folder)


@dataclass(frozen=True)
class WarmStartReport:
    """Result of a warm start."""

    losses: list[float]
    """Loss of every step, in nats per token."""
    solved: float
    """Share of the validation examples that were solved at the last measurement; 0 without examples."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.losses)


def warm_start(
    folder: Path,
    examples: Sequence[Example],
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    warmup: int = 20,
    max_grad_norm: float = 1.0,
    validation: Sequence[Example] = (),
    stop_at: float = 1.0,
) -> WarmStartReport:
    """Fine-tune the model in a folder on examples, in place.

    The loss is the mean negative log-probability of the tokens to be learnt; AdamW in float32 minimises it.

    Args:
        folder: Hugging Face model folder.
        examples: training examples, drawn at random, without repeats until all have been seen.
        steps, batch, warmup: most optimizer steps, examples in each step, and steps of linear warm-up.
        validation: examples that are not trained on; `share_solved` measures them every `VALIDATE_EVERY`
            steps.
        stop_at: share of solved validation examples at which training ends.

    Raises:
        ValueError: there are no examples, or a loss is not finite.
    """
    from transformers import AutoModelForCausalLM

    if not examples:
        raise ValueError("warm start needs at least one example")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    order = _endless_order(len(examples), steps * batch, seed)
    losses: list[float] = []
    solved = 0.0
    for step in range(steps):
        drawn = [examples[i] for i in order[step * batch : (step + 1) * batch]]
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, warmup))
        loss = _learn(model, optimizer, drawn, max_grad_norm=max_grad_norm)
        if not math.isfinite(loss):
            raise ValueError(f"warm start: loss is {loss} at step {step}; lower lr, now {lr:g}")
        losses.append(loss)
        if validation and (step + 1) % VALIDATE_EVERY == 0:
            solved = share_solved(model, validation)
            if solved >= stop_at:
                break
    model.save_pretrained(folder)
    return WarmStartReport(losses, solved)


def _learn(
    model: Any, optimizer: torch.optim.Optimizer, examples: Sequence[Example], *, max_grad_norm: float
) -> float:
    """Do one optimizer step and return the loss before it; none is done if the loss is not finite."""
    loss = _loss(model, examples)
    if torch.isfinite(loss):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return loss.item()


@torch.no_grad()
def share_solved(model: Any, examples: Sequence[Example]) -> float:
    """Return the share of examples that greedy decoding would reproduce in full.

    One forward pass is enough: if every learnt token is the most probable one after the true prefix, greedy
    decoding never leaves that prefix.
    """
    solved = 0
    for start in range(0, len(examples), VALIDATION_ROWS):
        token_ids, learnt = _padded(examples[start : start + VALIDATION_ROWS])
        best = model(input_ids=token_ids[:, :-1], use_cache=False).logits.argmax(-1)
        wrong = (best != token_ids[:, 1:]) & learnt[:, 1:]
        solved += int((~wrong.any(1)).sum())
    return solved / len(examples)


def _loss(model: Any, examples: Sequence[Example]) -> Tensor:
    token_ids, learnt = _padded(examples)
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
    chosen = learnt[:, 1:]
    return torch.nn.functional.cross_entropy(logits[chosen].float(), token_ids[:, 1:][chosen])


def _endless_order(examples: int, wanted: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    rounds = -(-wanted // examples)
    order = np.concatenate([rng.permutation(examples) for _ in range(max(1, rounds))])
    return [int(i) for i in order[:wanted]]


def _padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T] and the mask of learnt tokens [B, T], padded on the right.

    The padding needs no attention mask, because attention is causal.
    """
    width = max(len(ids) for ids, _ in examples)
    token_ids = torch.zeros(len(examples), width, dtype=torch.int64)
    learnt = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, (ids, mask) in enumerate(examples):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        learnt[row, : len(ids)] = torch.tensor(mask)
    learnt[:, 0] = False
    return token_ids, learnt
