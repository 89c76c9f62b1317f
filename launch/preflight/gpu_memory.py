"""Estimates the GPU memory that a run takes, before anything starts. By formula; nothing was measured on a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.placement import LEARNER, Placement
from launch.preflight.memory import BYTES, GB, ModelSize, activation_bytes, frozen_policies, tokens_at_once
from launch.run_file.sections import RunConfig
from learner.settings.learner import REDUCE_BUCKET, LearnerConfig

RANK_BYTES = {
    ("float32", 0): (16, 0),
    ("float32", 1): (8, 12),
    ("float32", 2): (4, 16),
    ("float32", 3): (0, 20),
    ("bfloat16", 2): (2, 16),
    ("bfloat16", 3): (0, 18),
}
"""Bytes for each trained parameter, by float type and ZeRO stage: those on each rank, and those that ranks share.

Weights have the float type. Sums of gradients, AdamW's two averages and the weights that it moves are float32."""
OPTIMIZER_BYTES = 16
"""Part of these bytes that `learner.offload` moves to the host: gradient sums, averages, and weights in float32."""
LOGITS_GB = 4.3
"""Logits of the largest chunk in bfloat16, and their gradient, see `learner.update.target_logp`."""
CONTEXT_GB = 1.0
"""CUDA, its libraries and their work space in one process."""
TIGHT = 0.8
"""Share of an engine's memory above which its weights leave little for the KV cache."""


@dataclass(frozen=True)
class Gpu:
    """What torch tells of a visible GPU."""

    name: str = ""
    memory_gb: float | None = None
    """None: not known."""
    free_gb: float | None = None
    """Memory that no process held when it was asked. None: not known."""
    bfloat16: bool = True
    """Whether it computes in bfloat16."""
    trouble: str = ""
    """Reason why torch cannot use it; "" if it can."""


def rank_gb(config: RunConfig, size: ModelSize, tokens: int) -> float:
    """Return the GPU memory of a rank of the learner, in GB.

    Args:
        tokens: tokens of one forward and backward pass. With 0 it is what the rank takes in any case.
    """
    learner, critic = config.learner, config.learner.algorithm.critic
    width = BYTES[learner.dtype_used]
    own, shared = RANK_BYTES[learner.dtype_used, learner.zero_stage_used]
    shared -= OPTIMIZER_BYTES if learner.offload == "optimizer" else 0
    trained = own + shared / learner.ranks
    each = width if learner.lora else trained
    each += width * frozen_policies(learner.algorithm)
    each += trained if critic is not None and critic.model == "separate" else 0
    passes = activation_bytes(config, size, tokens) / GB + LOGITS_GB if tokens else 0.0
    return CONTEXT_GB + (size.parameters * each + bucket_bytes(learner, size)) / GB + passes


def bucket_bytes(learner: LearnerConfig, size: ModelSize) -> int:
    """Return the bytes of the buffers from which a rank reduces gradients.

    DeepSpeed fills a bucket in the learner's float type: during a backward pass up to stage 2, and for the life of the
    engine at stage 3, so a separate critic has its own there. Gradients of adapters are not counted, because they are
    few.
    """
    alone = learner.zero_stage_used == 0 and learner.ranks == 1
    if learner.lora or alone:
        return 0
    critic = learner.algorithm.critic
    engines = 2 if learner.zero_stage_used == 3 and critic is not None and critic.model == "separate" else 1
    return engines * BYTES[learner.dtype_used] * min(REDUCE_BUCKET, size.parameters)


def engine_gb(config: RunConfig, size: ModelSize) -> float:
    """Return the GPU memory that an engine takes on each of its GPUs without any KV cache, in GB."""
    own = config.generator
    weights = size.parameters * BYTES[own.dtype_used] / own.tensor_parallel_size
    return CONTEXT_GB + weights / GB


def too_little_gpu_memory(
    config: RunConfig, placed: Placement, gpus: Sequence[Gpu], size: ModelSize | None
) -> tuple[list[str], list[str]]:
    """Return what cannot fit into the GPUs' memory, and what may not fit, a line each with the setting to change.

    A judge of its own model is taken for one of the run's model.

    Args:
        config: with every "auto" decided, see `launch.hardware`.
        size: sizes of the model; None: not known.
    """
    refused: list[str] = []
    tight: list[str] = []
    for place, posts in placed.by_gpu().items():
        gpu = gpus[place] if place < len(gpus) else Gpu()
        if gpu.memory_gb is None or size is None:
            what = "the model's size" if size is None else "its memory"
            tight.append(f"GPU {place}: whether the run fits is unknown, because {what} is not known")
            continue
        # An evaluation trains nothing.
        if LEARNER in posts and config.learner.steps:
            refused += _refused_learner(config, place, gpu.memory_gb, size)
            awake = sum(post in placed.sleepers(config) for post in posts)
            refused += _refused_awake(config, place, gpu.memory_gb, size, awake)
            tight += _tight_learner(config, place, gpu.memory_gb, size)
        if engines := [post for post in posts if post != LEARNER]:
            refused += _refused_engine(config, place, gpu.memory_gb, size)
            tight += _tight_engine(config, place, gpu.memory_gb, size, len(engines), gpu.free_gb)
    # Equal lines of several GPUs differ in the number only; the first one of each is enough.
    return _first_of_each(refused), _first_of_each(tight)


def _first_of_each(lines: Sequence[str]) -> list[str]:
    return list({line.partition(": ")[2]: line for line in reversed(lines)}.values())[::-1]


def _limit_gb(config: RunConfig, there_gb: float) -> float:
    limit = config.learner.gpu_memory_utilization
    return there_gb if isinstance(limit, str) else there_gb * limit


def _refused_learner(config: RunConfig, place: int, there_gb: float, size: ModelSize) -> Iterator[str]:
    least, limit = rank_gb(config, size, 0), _limit_gb(config, there_gb)
    if least > limit:
        offload = "" if config.learner.offload == "optimizer" else 'set learner.offload = "optimizer", '
        yield (
            f"GPU {place}: a rank of the learner takes at least {least:.1f} GB, and may use {limit:.1f} of "
            f"{there_gb:.1f} GB; raise learner.processes with learner.zero_stage = 3, {offload}train adapters "
            "([learner.lora]), give the learner a GPU of its own, or take a smaller model"
        )


def _tight_learner(config: RunConfig, place: int, there_gb: float, size: ModelSize) -> Iterator[str]:
    tokens, limit = tokens_at_once(config), _limit_gb(config, there_gb)
    most = rank_gb(config, size, tokens)
    if rank_gb(config, size, 0) <= limit < most:
        yield (
            f"GPU {place}: a rank of the learner may take {most:.1f} GB, and may use {limit:.1f} of {there_gb:.1f} GB; "
            f"if it runs short, lower learner.micro_batch_tokens, which lets {tokens} tokens through at once, or set "
            "learner.gradient_checkpointing"
        )


def _refused_engine(config: RunConfig, place: int, there_gb: float, size: ModelSize) -> Iterator[str]:
    share, least = config.generator.gpu_memory_utilization_used, engine_gb(config, size)
    if least > share * there_gb:
        yield (
            f"GPU {place}: an engine takes at least {least:.1f} GB, and may use {share * there_gb:.1f} of "
            f"{there_gb:.1f} GB; raise generator.tensor_parallel_size or generator.gpu_memory_utilization, or take a "
            "smaller model"
        )


def _refused_awake(
    config: RunConfig, place: int, there_gb: float, size: ModelSize, awake: int
) -> Iterator[str]:
    """Yield why engines that sleep in updates would find no room when they wake.

    Args:
        awake: number of such engines on the GPU.
    """
    engines_gb = awake * config.generator.gpu_memory_utilization_used * there_gb
    kept_gb = rank_gb(config, size, 0)
    if awake and engines_gb + kept_gb > there_gb:
        yield (
            f"GPU {place}: the learner keeps about {kept_gb:.1f} GB between updates, and engines that wake beside it "
            f"take {engines_gb:.1f}, of {there_gb:.1f} GB; lower generator.gpu_memory_utilization, or leave it out"
        )


def _tight_engine(
    config: RunConfig, place: int, there_gb: float, size: ModelSize, engines: int, free_gb: float | None
) -> Iterator[str]:
    share, least = config.generator.gpu_memory_utilization_used, engine_gb(config, size)
    room = share * there_gb - least
    if 0 <= room < (1 - TIGHT) * share * there_gb:
        yield (
            f"GPU {place}: an engine has {room:.1f} GB for the KV cache; if requests wait for room, raise "
            "generator.tensor_parallel_size or generator.gpu_memory_utilization"
        )
    if free_gb is not None and free_gb < share * engines * there_gb:
        yield (
            f"GPU {place}: only {free_gb:.1f} of {there_gb:.1f} GB are free, and its engines want "
            f"{share * engines * there_gb:.1f}; end the processes that hold the rest, or lower "
            "generator.gpu_memory_utilization"
        )
