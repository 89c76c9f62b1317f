"""A learner step, and a plain PyTorch loop on the same tokens.

The plain loop is what one writes first: rows in the order in which they come, padded to the longest of each
micro-batch, all logits with a log-softmax in float32, one loss, and the fused AdamW on the weights as they are. It has
no DeepSpeed, no float32 masters beside bfloat16 weights, no proximal policy, no entropy and no metrics. It may thus be
faster, and on a large vocabulary it needs more memory.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import learner.update.target_logp as heads
from benchmarks.gpu.ceilings import product_rate
from benchmarks.gpu.setting import MODELS, GpuSetting, load, make_batch_of, make_model, operations
from benchmarks.report import Figure
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from learner.update.engine import TrainingEngine

CHUNKS = (2**25, heads.GPU_CHUNK_ELEMENTS, 2**28)
"""Elements of the logits that the learner holds at once; the one in the middle is what it takes on a GPU."""
NAMES = ("CHUNK_ELEMENTS", "GPU_CHUNK_ELEMENTS", "PLAIN_GPU_CHUNK_ELEMENTS")
"""Names of that number in `learner.update.target_logp`."""
MICRO_BATCH_TOKENS = {"4B": 2048}
"""Tokens of a micro-batch, where the usual number does not fit: both models are on the GPU at the same time."""
USUAL_MICRO_BATCH_TOKENS = 8192
STEP_TOKENS = 32_768


class PlainLoop:
    """One model, one optimizer, one padded batch after the other."""

    def __init__(self, setting: GpuSetting, folder: Any, trajectories: list[Trajectory], rows: int) -> None:
        self._model = load(folder, setting.dtype, setting.device).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        returns = torch.tensor([t.return_ for t in trajectories])
        advantages = (returns - returns.mean()).to(setting.device)
        self._parts = [
            (
                padded([t.token_ids for t in trajectories[at : at + rows]]).long().to(setting.device),
                padded([t.action_mask for t in trajectories[at : at + rows]]).to(setting.device),
                advantages[at : at + rows],
            )
            for at in range(0, len(trajectories), rows)
        ]
        self._trained = float(sum(t.action_tokens for t in trajectories))

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


def padded(arrays: list[Any]) -> torch.Tensor:
    """Return arrays as the rows of a tensor, with zeros behind those that are shorter than the longest."""
    return pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)


@contextmanager
def chunk_elements(elements: int) -> Iterator[None]:
    """Let the learner hold this many elements of the logits at once."""
    before = {name: getattr(heads, name) for name in NAMES}
    vars(heads).update(dict.fromkeys(NAMES, elements))
    try:
        yield
    finally:
        vars(heads).update(before)


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure each model at each length, with mixed lengths, and the longest rows with gradient checkpointing."""
    fastest = max(product_rate(setting))
    return [figure for work in works(setting) for figure in row(setting, work, fastest)]


@dataclass(frozen=True)
class Rows:
    """The work of one measurement."""

    model: str
    length: int
    """Tokens of each row, or of the longest one."""
    mixed: bool = False
    """True if lengths are spread from an eighth of the longest to the longest."""
    checkpointing: bool = False
    """True if the learner computes activations again."""

    @property
    def words(self) -> str:
        """Name of the measurement, for the table."""
        rows = f"rows up to {self.length}" if self.mixed else f"rows of {self.length}"
        return f"{self.model}, {rows}{', with gradient checkpointing' if self.checkpointing else ''}"

    def micro_batch_tokens(self, setting: GpuSetting) -> int:
        """Return the tokens of a micro-batch: at least one row."""
        usual = 128 if setting.tiny else MICRO_BATCH_TOKENS.get(self.model, USUAL_MICRO_BATCH_TOKENS)
        return max(self.length, usual)

    def trajectories(self, setting: GpuSetting) -> list[Trajectory]:
        """Return the trajectories of one step."""
        tokens = 256 if setting.tiny else STEP_TOKENS
        return make_batch_of(MODELS[self.model].vocabulary, self.length, tokens, mixed=self.mixed)


def row(setting: GpuSetting, rows: Rows, fastest: float) -> list[Figure]:
    """Return the figures of one piece of work.

    Args:
        fastest: operations per second of a large product, to which the used share refers.
    """
    folder = make_model(rows.model, setting.shelf, setting.dtype, setting.device)
    trajectories = rows.trajectories(setting)
    config = LearnerConfig.model_validate(
        {
            "dtype": setting.dtype_name,
            "micro_batch_tokens": rows.micro_batch_tokens(setting),
            "gradient_checkpointing": rows.checkpointing,
            "optimizer": {"lr": 1e-6},
        }
    )
    engine = TrainingEngine(config, model=str(folder), total_steps=1000, seed=0)
    chunks = CHUNKS[1:2] if rows.checkpointing or rows.mixed or setting.quick else CHUNKS
    try:
        plain = PlainLoop(setting, folder, trajectories, max(1, config.micro_batch_tokens // rows.length))
        padding = list[float]()

        def ours(elements: int) -> None:
            with chunk_elements(elements):
                report = engine.update(trajectories, current_version=0)
            assert report.applied
            padding.append(report.metrics["learner/padding_fraction"])

        arms: dict[str, Callable[[], object]] = {chunk_name(n): partial(ours, n) for n in chunks}
        found = setting.in_turns(arms | {"plain": plain.step})
        memory = peaks(setting, {"learner": arms[chunk_name(chunks[0])], "plain": plain.step})
        parameters = engine.parameters.whole
    finally:
        engine.close()
        gc.collect()
    figures = rates(rows, trajectories, found, parameters, fastest)
    figures.append(
        Figure(f"{rows.words}: peak memory, both models loaded", "GB", memory["learner"], "plain PyTorch",
               memory["plain"])
    )  # fmt: skip
    if rows.mixed:
        figures.append(Figure(f"{rows.words}: padding of the learner", "share", padding[-1:]))
    return figures


def works(setting: GpuSetting) -> list[Rows]:
    """Return what is measured."""
    lengths = (32,) if setting.tiny else (512, 2048, 8192)
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    if setting.quick:
        first, *others = setting.models
        return [
            Rows(first, middle),
            Rows(first, longest),
            Rows(first, middle, mixed=True),
            *(Rows(other, middle) for other in others),
        ]
    return [
        *(Rows(name, length) for name in setting.models for length in lengths),
        *(Rows(name, longest, checkpointing=True) for name in setting.models),
        *(Rows(name, middle, mixed=True) for name in setting.models),
    ]


def chunk_name(elements: int) -> str:
    """Return the size of a chunk in words.

    Example:
        >>> chunk_name(2**25)
        '2^25'
    """
    return f"2^{elements.bit_length() - 1}"


def rates(
    rows: Rows,
    trajectories: list[Trajectory],
    found: dict[str, list[float]],
    parameters: int,
    fastest: float,
) -> list[Figure]:
    """Return trained tokens per second of each arm, and the used share of the device.

    Args:
        found: seconds of each arm.
        parameters: parameters of the model.
    """
    trained = sum(t.action_tokens for t in trajectories)
    bare = [trained / s for s in found["plain"]]
    arms = [arm for arm in found if arm != "plain"]
    work = sum(
        operations(MODELS[rows.model], parameters, len(t.token_ids), len(t.token_ids)) for t in trajectories
    )
    used = {side: [work / s / fastest for s in found[side]] for side in (arms[0], "plain")}
    return [
        *(
            Figure(f"{rows.words}: learner step, chunks of {arm}", "trained tokens/s",
                   [trained / s for s in found[arm]], "plain PyTorch", bare)
            for arm in arms
        ),
        Figure(f"{rows.words}: operations over those of a product", "share", used[arms[0]], "plain PyTorch",
               used["plain"]),
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
