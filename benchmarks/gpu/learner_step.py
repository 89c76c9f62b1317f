"""A learner step, and a plain PyTorch loop on the same tokens.

The plain loop is what one writes first: rows of equal length, all logits with a log-softmax in float32, one loss,
and the fused AdamW on the weights as they are. It has no DeepSpeed, no float32 masters beside bfloat16 weights, no
proximal policy, no entropy and no metrics. It may thus be faster, and on a large vocabulary it needs more memory.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import learner.update.target_logp as heads
from benchmarks.gpu.ceilings import product_rate
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.models import MODELS, load, make_batch_of, make_model, operations
from benchmarks.gpu.setting import GpuSetting
from learner.config import LearnerConfig
from learner.trajectory import Trajectory
from learner.update.engine import TrainingEngine

CHUNKS = (2**25, 2**27, 2**29)
"""Elements of the logits that the learner holds at once, `learner.update.target_logp.CHUNK_ELEMENTS`."""
MICRO_BATCH_TOKENS = 8192
STEP_TOKENS = 32_768


class PlainLoop:
    """One model, one optimizer, one padded batch after the other."""

    def __init__(self, setting: GpuSetting, folder: Any, trajectories: list[Trajectory], rows: int) -> None:
        self._model = load(folder, setting.dtype, setting.device).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        ids = torch.stack([torch.from_numpy(t.token_ids) for t in trajectories]).long().to(setting.device)
        mask = torch.stack([torch.from_numpy(t.action_mask) for t in trajectories]).to(setting.device)
        returns = torch.tensor([t.return_ for t in trajectories], device=setting.device)
        advantages = returns - returns.mean()
        self._parts = list(zip(*(torch.split(t, rows) for t in (ids, mask, advantages)), strict=True))
        self._trained = float(mask[:, 1:].sum())

    def step(self) -> None:
        """Compute the gradient of all rows and take a step."""
        for ids, mask, advantage in self._parts:
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
            loss = -(logp * advantage[:, None] * mask[:, 1:]).sum() / self._trained
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


@contextmanager
def chunk_elements(elements: int) -> Iterator[None]:
    """Let the learner hold this many elements of the logits at once."""
    before = heads.CHUNK_ELEMENTS, heads.GPU_CHUNK_ELEMENTS
    heads.CHUNK_ELEMENTS = heads.GPU_CHUNK_ELEMENTS = elements
    try:
        yield
    finally:
        heads.CHUNK_ELEMENTS, heads.GPU_CHUNK_ELEMENTS = before


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure each model at each length."""
    fastest = max(product_rate(setting))
    lengths = (32,) if setting.tiny else (512, 2048, 8192)
    return [
        figure
        for name in setting.models
        for length in lengths
        for figure in row(setting, name, length, fastest)
    ]


def row(setting: GpuSetting, name: str, length: int, fastest: float) -> list[Figure]:
    """Return the figures of one model and length.

    Args:
        fastest: operations per second of a large product, to which the used share refers.
    """
    shape, folder = MODELS[name], make_model(name, setting.folder, setting.dtype)
    trajectories = make_batch_of(shape.vocabulary, length, 256 if setting.tiny else STEP_TOKENS)
    trained = sum(t.action_tokens for t in trajectories)
    config = LearnerConfig.model_validate(
        {
            "dtype": setting.dtype_name,
            "micro_batch_tokens": max(length, 128 if setting.tiny else MICRO_BATCH_TOKENS),
            "optimizer": {"lr": 1e-6},
        }
    )
    engine = TrainingEngine(config, model=str(folder), total_steps=1000, seed=0)
    try:
        plain = PlainLoop(setting, folder, trajectories, max(1, config.micro_batch_tokens // length))

        def ours(elements: int) -> None:
            with chunk_elements(elements):
                assert engine.update(trajectories, current_version=0).applied

        arms: dict[str, Callable[[], object]] = {f"2^{n.bit_length() - 1}": partial(ours, n) for n in CHUNKS}
        found = setting.in_turns(arms | {"plain": plain.step})
        memory = peaks(setting, {"learner": arms["2^25"], "plain": plain.step})
        parameters = engine.parameters.whole
    finally:
        engine.close()
        gc.collect()
    bare = [trained / s for s in found["plain"]]
    work = operations(shape, parameters, sum(len(t.token_ids) for t in trajectories), length)
    where = f"{name}, rows of {length}"
    used = {side: [work / s / fastest for s in found[side]] for side in ("2^25", "plain")}
    return [
        *(
            Figure(f"{where}: learner step, chunks of {n}", "trained tokens/s", [trained / s for s in found[n]],
                   "plain PyTorch", bare)
            for n in arms
        ),
        Figure(f"{where}: operations over those of a product", "share", used["2^25"], "plain PyTorch", used["plain"]),
        Figure(f"{where}: peak memory, both models loaded", "GB", memory["learner"], "plain PyTorch", memory["plain"]),
    ]  # fmt: skip


def peaks(setting: GpuSetting, arms: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the peak memory of each arm in a list; the list is empty on a CPU, where it is not measured."""
    found: dict[str, list[float]] = {}
    for name, call in arms.items():
        setting.forget_peak()
        setting.seconds(call)
        peak = setting.peak_memory()
        found[name] = [] if peak is None else [peak]
    return found
