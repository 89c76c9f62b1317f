"""The two sides of `benchmarks.learner`: models and batches of a given size, and a bare PyTorch loop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from learner.trajectory import Trajectory
from learner.update.micro_batches import MicroBatch
from protocol.messages.episodes import Reward, Turn

LONGEST = 400
"""Upper limit of the tokens of an answer in the long-tailed arm."""


@dataclass(frozen=True)
class Size:
    """Shape of a Qwen3 model with tied embeddings, and the number of trajectories per round."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    trajectories: int


SIZES = {
    "1M": Size(vocabulary=128, width=160, layers=4, heads=4, inner=448, trajectories=128),
    "10M": Size(vocabulary=4096, width=320, layers=7, heads=5, inner=896, trajectories=64),
    "50M": Size(vocabulary=16384, width=512, layers=13, heads=8, inner=1408, trajectories=32),
    "135M": Size(vocabulary=49152, width=576, layers=30, heads=9, inner=1536, trajectories=32),
}
GROUP = 8
LEARNING_RATE = 3e-4
SHARED = {"one prompt": [(45, False), (6, True)], "three turns": [(45, False)] + [(8, True), (12, False)] * 3}
"""Turns (tokens, sampled) of arms in which a group shares the prompt, and all but the last sampled turn."""


def make_model(folder: Path, size: Size) -> int:
    """Write a Qwen3 model with random weights. Return the number of its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, head_dim=64 if size.heads > 4 else 32,
        intermediate_size=size.inner, max_position_embeddings=1024, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def answer_lengths(lengths: str, count: int) -> NDArray[np.int64]:
    """Return the tokens of each answer: 6 to 14, or 8 plus a Pareto tail (shape 1.1) cut at `LONGEST`."""
    rng = np.random.default_rng(1)
    if lengths == "uniform":
        return rng.integers(6, 15, count)
    return np.minimum(LONGEST, 8 + rng.pareto(1.1, count) * 10).astype(np.int64)


def make_trajectories(lengths: str, size: Size) -> list[Trajectory]:
    """Return trajectories in groups of 8, with prompts of 22 to 28 tokens. All tokens are random.

    In the arms of `SHARED`, the members of a group begin with the same tokens.
    """
    if lengths in SHARED:
        return shared_trajectories(SHARED[lengths], size)
    rng = np.random.default_rng(0)
    result = []
    for i, answer in enumerate(answer_lengths(lengths, size.trajectories).tolist()):
        prompt = int(rng.integers(22, 29))
        total = prompt + answer
        mask = np.arange(total) >= prompt
        token_ids = rng.integers(0, size.vocabulary, total)
        turns = [Turn(0, 0, prompt, False), Turn(1, prompt, total, True)]
        result.append(_trajectory(i, token_ids, mask, turns, float(rng.random()), size))
    return result


def _trajectory(
    number: int,
    token_ids: NDArray[Any],
    mask: NDArray[np.bool_],
    turns: list[Turn],
    reward: float,
    size: Size,
) -> Trajectory:
    """Return a trajectory of the newest version, whose last turn has the reward."""
    return Trajectory(
        trajectory_id=f"t{number}",
        group_id=f"g{number // GROUP}",
        group_size=GROUP,
        env="benchmark",
        status="finished",
        purpose="train",
        token_ids=token_ids.astype(np.int32),
        action_mask=mask,
        logp_behaviour=np.where(mask, -math.log(size.vocabulary), 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turns=turns,
        rewards=[Reward("score", turns[-1].index, reward)],
    )


def shared_trajectories(turns: Sequence[tuple[int, bool]], size: Size) -> list[Trajectory]:
    """Return trajectories whose groups share all tokens before the last sampled turn.

    Args:
        turns: number of tokens of each turn, and whether they are sampled.
    """
    rng = np.random.default_rng(0)
    ends = np.cumsum([tokens for tokens, _ in turns]).tolist()
    starts = [0, *ends[:-1]]
    mask = np.repeat([sampled for _, sampled in turns], [tokens for tokens, _ in turns])
    own = max(start for start, (_, sampled) in zip(starts, turns, strict=True) if sampled)
    numbered = enumerate(zip(starts, ends, turns, strict=True))
    listed = [Turn(number, start, end, sampled) for number, (start, end, (_, sampled)) in numbered]
    result = []
    for i in range(size.trajectories):
        if i % GROUP == 0:
            beginning = rng.integers(0, size.vocabulary, own)
        token_ids = np.concatenate([beginning, rng.integers(0, size.vocabulary, ends[-1] - own)])
        result.append(_trajectory(i, token_ids, mask, listed, float(rng.random()), size))
    return result


class BareLoop:
    """The loop that one would write by hand for just this loss: no roles, config, records or DeepSpeed.

    The loop gets the learner's own micro-batches as tensors before the clock starts. It thus pays nothing for
    batching and computes the same tokens, padding included. It is a tuned loop: it applies the output layer
    at the targets only, takes log-probabilities from the fused cross-entropy, and steps with the fused AdamW.
    It computes no entropy and no metrics, and does not check whether the loss is finite. With several
    optimizer steps per batch it makes the proximal pass as the learner does: once, before the first step,
    without gradient.
    """

    def __init__(self, folder: Path, mini_batches: Sequence[Sequence[MicroBatch]]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._mini_batches = [[_tensors(m) for m in part] for part in mini_batches]

    def update(self) -> None:
        """Run one update: all optimizer steps on the batch."""
        proximal: list[list[Tensor | None]] = [[None] * len(part) for part in self._mini_batches]
        if len(self._mini_batches) > 1:
            with torch.no_grad():
                proximal = [[self._logp(m) for m in part] for part in self._mini_batches]
        for part, known in zip(self._mini_batches, proximal, strict=True):
            for m, logp_proximal in zip(part, known, strict=True):
                torch.autograd.backward(self._loss(m, logp_proximal))
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _logp(self, m: dict[str, Tensor]) -> Tensor:
        hidden = self._model.model(input_ids=m["token_ids"], use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden.flatten(0, 1)[m["position"]])
        return -F.cross_entropy(logits, m["target"], reduction="none")

    def _loss(self, m: dict[str, Tensor], logp_proximal: Tensor | None) -> Tensor:
        logp = self._logp(m)
        proximal = logp.detach() if logp_proximal is None else logp_proximal
        ratio, advantage = (logp - proximal).exp(), m["advantage"]
        weight = (proximal - m["logp_behaviour"]).exp().clamp(max=2.0)
        objective = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return -(objective * m["weight"]).sum()


def _tensors(m: MicroBatch) -> dict[str, Tensor]:
    arrays = {"token_ids": m.token_ids, "position": m.position, "target": m.target, **m.columns}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
