"""How far summed gradients are off: those that the learner sums in float32, and plain sums in bfloat16.

Both compute each micro-batch in bfloat16. "Sums" compares with the exact sums of these very gradients, so it is the
error of adding alone. "Gradient" compares with a model in float32, so it has the rounding of each pass, too.
"""

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.setting import MODELS, GpuSetting, make_model
from benchmarks.report import Figure
from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from learner.update.policy import PolicyModule, load_policy
from learner.update.ranks import accumulation, finish_step

Gradients = Mapping[str, Tensor]


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure the first model with few and many micro-batches."""
    name = setting.models[0]
    return [
        figure for count in ((4,) if setting.tiny else (8, 64)) for figure in errors(setting, name, count)
    ]


def errors(setting: GpuSetting, name: str, count: int) -> list[Figure]:
    """Return the errors of one number of micro-batches."""
    folder = make_model(name, setting.shelf, torch.bfloat16, setting.device)
    batches = MicroBatches(count, MODELS[name].vocabulary, *((2, 12) if setting.tiny else (4, 512)))
    config = LearnerConfig(zero_stage=2, dtype="bfloat16")
    engine = TrainingEngine(config, model=str(folder), total_steps=1, seed=0)
    try:
        ours = summed_by(engine, batches)
    finally:
        engine.close()
        gc.collect()
    exact, rounded = exact_sums(folder, batches, setting.device)
    single = float32_gradient(folder, batches, setting.device)
    where = f"{name}, {count} micro-batches of {batches.tokens} tokens"
    beside = "sums in bfloat16"
    return [
        Figure(f"{where}: error of the sums", "share", [relative_error(ours, exact)], beside,
               [relative_error(rounded, exact)]),
        Figure(f"{where}: error of the gradient, to float32", "share", [relative_error(ours, single)], beside,
               [relative_error(rounded, single)]),
    ]  # fmt: skip


class MicroBatches:
    """Micro-batches of random tokens, and the share of the loss that each has.

    Args:
        count: micro-batches of all ranks.
        rows: rows of each.
        length: tokens of a row.
    """

    def __init__(self, count: int, vocabulary: int, rows: int, length: int) -> None:
        self.count, self._vocabulary, self._shape = count, vocabulary, (rows, length)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self._shape[0] * self._shape[1]

    def inputs(self, index: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the arguments of the policy for one micro-batch."""
        ids = torch.from_numpy(np.random.default_rng(index).integers(3, self._vocabulary, self._shape))
        position = torch.arange(ids.numel()).view(ids.shape)[:, :-1].reshape(-1)
        found = ids, position, ids[:, 1:].reshape(-1), torch.ones(len(position))
        return tuple(part.to(device) for part in found)

    def loss(self, outputs: Any) -> Tensor:
        """Return the loss of a micro-batch."""
        found: Tensor = -outputs.logp.mean() / self.count
        return found

    def losses(self, module: Any, device: torch.device, indices: range | None = None) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch, or of those in ``indices``."""
        for index in range(self.count) if indices is None else indices:
            yield self.loss(module(*self.inputs(index, device)))


def summed_by(engine: TrainingEngine, batches: MicroBatches) -> Gradients:
    """Return the gradients that an engine sums over its ranks and micro-batches. Every rank has to call this."""
    from deepspeed.utils import safe_get_full_grad

    zero, ranks = engine.deepspeed, engine.ranks
    mine = range(dist.get_rank() if ranks > 1 else 0, batches.count, ranks)
    with accumulation(zero, ranks) as backward:
        for index, loss in zip(mine, batches.losses(zero, zero.device, mine), strict=True):
            backward(loss, index == mine[-1])
    found = {name: safe_get_full_grad(p) for name, p in zero.module.named_parameters()}
    found = {name: gradient.detach().cpu() for name, gradient in found.items()}
    finish_step(zero, lr=0.0)
    return found


def exact_sums(model: str | Path, batches: MicroBatches, device: torch.device) -> tuple[Gradients, Gradients]:
    """Return the sums of the gradients of a bfloat16 model in float64, and in bfloat16."""
    module = _module(model, torch.bfloat16, device)
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
    rounded = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for loss in batches.losses(module, device):
        module.zero_grad()
        torch.autograd.backward(loss)
        for name, p in module.named_parameters():
            assert p.grad is not None
            exact[name] += p.grad
            rounded[name] += p.grad
    return _on_cpu(exact), _on_cpu(rounded)


def float32_gradient(model: str | Path, batches: MicroBatches, device: torch.device) -> Gradients:
    """Return the gradient of a float32 model."""
    module = _module(model, torch.float32, device)
    for loss in batches.losses(module, device):
        torch.autograd.backward(loss)
    return _on_cpu({name: p.grad for name, p in module.named_parameters() if p.grad is not None})


def _module(model: str | Path, dtype: torch.dtype, device: torch.device) -> PolicyModule:
    module: PolicyModule = load_policy(str(model), dtype=dtype).to(device)
    module.find_shortcuts()
    return module


def _on_cpu(gradients: Gradients) -> Gradients:
    return {name: gradient.detach().cpu() for name, gradient in gradients.items()}


def relative_error(found: Gradients, exact: Gradients) -> float:
    """Return the norm of the difference over the norm of the exact gradients.

    Example:
        >>> relative_error({"a": torch.tensor([3.0, 5.0])}, {"a": torch.tensor([3.0, 4.0])})
        0.2
    """
    difference = sum(float((found[name].double() - exact[name].double()).square().sum()) for name in exact)
    whole = sum(float(exact[name].double().square().sum()) for name in exact)
    return float((difference / whole) ** 0.5)
