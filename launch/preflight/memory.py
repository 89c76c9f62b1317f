"""Estimates the memory that a run takes on this host and on its GPUs, before anything starts. By formula.

The shares of a host were measured on a CPU (docs/run/capacity.md); nothing was measured on a GPU. On a host with GPUs,
learner and generators keep models there, and the host keeps policy versions, and the weights while they are loaded.
"""

import contextlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.placement import LEARNER, Placement
from launch.run_file.sections import RunConfig
from learner.settings.algorithm import AlgorithmConfig, KlConvex
from learner.settings.learner import REDUCE_BUCKET, LearnerConfig

GB, MIB = 1e9, 1 << 20
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LIBRARIES = {"learner": 0.7, "generator": 1.6, "actor": 0.1, "broker": 0.1, "weights": 0.1}
"""Memory of a process without its model, in GB: mostly the libraries that it imports."""
STATE_BYTES = {
    ("float32", 0): (21, 0),
    ("float32", 1): (18, 14),
    ("float32", 2): (15, 16),
    ("float32", 3): (24, 16),
    ("bfloat16", 2): (12, 16),
    ("bfloat16", 3): (17, 16),
}
"""Most bytes for each trained parameter, by float type and ZeRO stage: those on each rank, and those that ranks share.

Each rank has weights, gradients, and DeepSpeed's and gloo's copies of them. The ranks share AdamW's two averages, and,
from stage 2 on, sums of gradients and the weights that it moves, in float32 whatever the float type is."""
ENGINE_COPIES = 2
"""Copies of the weights that a generator holds: those that it samples with, and the newest version."""
OFFLOADED_BYTES = 20
"""Bytes of the host's memory for each trained parameter of `learner.offload`, which the ranks share: weights and
averages in float32, gradients and their sums, and weights in bfloat16 on their way back."""
GPU_LIBRARIES_GB = 3.0
"""Host memory of a process that computes on a GPU, without its model. Estimated, not measured."""
WIDTHS, INNER_WIDTHS = 8, 4
"""Activations of a token in one layer: so many times the hidden size, and the inner size of the feed-forward layer."""
SHARED_MARGIN = 1024 * MIB
"""Shared memory beside the policy versions: queues of the engine and of torch."""
VERSIONS_ON_HOST = 4
"""Most policy versions in the shared memory of a host: two in the cache, one being fetched, one being loaded."""
MEMINFO, CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
"""Keys of config.json."""
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 8
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that decide about memory."""

    parameters: int
    hidden: int
    inner: int
    layers: int


@dataclass(frozen=True)
class RoleMemory:
    """Memory of the processes of one role, in GB."""

    role: str
    processes: int
    each_gb: float


def model_size(folder: Path) -> ModelSize | None:
    """Return the sizes of the model in a folder; None if its files do not tell them.

    Of a model of the hub that is not downloaded yet, the index of its weights tells them, if it has one.
    """
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        parameters = sum(_numbers_in(file) for file in sorted(folder.glob("*.safetensors")))
        parameters = parameters or _numbers_listed(folder / INDEX, content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
    text = content.get("text_config")
    part = text if isinstance(text, dict) else content
    found = [number for key in SIZES if isinstance(number := part.get(key), int)]
    return ModelSize(parameters, *found) if parameters and len(found) == len(SIZES) else None


def _numbers_listed(index: Path, content: dict[str, Any]) -> int:
    """Return how many numbers the index of a model's weights tells of."""
    metadata = json.loads(index.read_text(encoding="utf-8"))["metadata"]
    if "total_parameters" in metadata:
        return int(metadata["total_parameters"])
    return int(metadata["total_size"]) // BYTES[content.get("dtype") or content["torch_dtype"]]


def _numbers_in(file: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header."""
    with open(file, "rb") as content:
        (length,) = struct.unpack("<Q", content.read(HEADER_BYTES))
        header = json.loads(content.read(min(length, MAX_HEADER_BYTES)))
    return sum(_product(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _product(shape: list[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


def shares(config: RunConfig, size: ModelSize, tokens: int) -> list[RoleMemory]:
    """Return the memory of each role's processes on a host without a GPU.

    Args:
        tokens: tokens of one forward and backward pass. With 0 it is what the run takes in any case.
    """
    learner, generator = config.learner, config.generator
    ranks, stage = learner.processes, learner.zero_stage_used
    width = BYTES[learner.dtype_used]
    own, shared = STATE_BYTES[learner.dtype_used, stage]
    trained = own + shared / learner.ranks
    # Adapters are a small part of the model, so that only its frozen weights count.
    each = width if learner.lora else trained
    each += width * frozen_policies(learner.algorithm)
    critic = learner.algorithm.critic
    each += trained if critic is not None and critic.model == "separate" else 0
    state = size.parameters * each
    activations = activation_bytes(config, size, tokens)
    versions = versions_at_once(config) * version_bytes(config, size) / ranks
    found = [RoleMemory("learner", ranks, LIBRARIES["learner"] + (state + activations + versions) / GB)]
    if generator.backend == "vllm":
        weights = ENGINE_COPIES * size.parameters * BYTES[generator.dtype_used]
        engine = weights + (generator.kv_cache_mb << 20)
        found.append(RoleMemory("generator", generator.count, LIBRARIES["generator"] + engine / GB))
    found.append(RoleMemory("actor", config.actor.count, LIBRARIES["actor"]))
    found.append(RoleMemory("broker", 1, LIBRARIES["broker"]))
    return [role for role in found if role.processes]


def offloaded_bytes(config: RunConfig, size: ModelSize) -> float:
    """Return the bytes of the host's memory that a rank's offloaded optimizer takes beside a GPU."""
    learner = config.learner
    if learner.offload == "none" or learner.lora is not None or not learner.steps:
        return 0.0
    critic = learner.algorithm.critic
    models = 2 if critic is not None and critic.model == "separate" else 1
    return models * OFFLOADED_BYTES * size.parameters / learner.ranks


def sleeping_bytes(config: RunConfig, size: ModelSize) -> int:
    """Return the bytes of the host's memory that hold the weights of engines that sleep in updates."""
    own = config.generator
    return own.count * size.parameters * BYTES[own.dtype_used] if own.sleep_in_updates is True else 0


def versions_at_once(config: RunConfig) -> int:
    """Return the most policy versions in shared memory: those that are kept, and the one that is being written.

    An evaluation publishes one.
    """
    learner = config.learner
    return max(1, min(learner.keep_versions + 1, learner.steps // learner.publish_every))


def version_bytes(config: RunConfig, size: ModelSize) -> int:
    """Return the bytes of one policy version."""
    learner = config.learner
    return size.parameters * (2 if learner.publish_dtype == "bfloat16" else BYTES[learner.dtype_used])


def shared_bytes(config: RunConfig, size: ModelSize | None) -> tuple[int, int]:
    """Return the bytes that /dev/shm needs on the head, and on a host or in a pod with a generator.

    Args:
        size: sizes of the model; None: a model so small that the margin holds all its versions.
    """
    if size is None:
        return SHARED_MARGIN, SHARED_MARGIN
    each = version_bytes(config, size)
    return versions_at_once(config) * each + SHARED_MARGIN, VERSIONS_ON_HOST * each + SHARED_MARGIN


def shared_words(config: RunConfig, size: ModelSize) -> str:
    """Return the sizes that /dev/shm needs in containers, as Kubernetes and `--shm-size` write them."""
    head, host = map(in_mebibytes, shared_bytes(config, size))
    return (
        f"/dev/shm in a container: {head} for the whole run or its head, {host} for a further host with a generator "
        "(kubernetes.head_shm and kubernetes.shm, which follow from the model if they are empty)"
    )


def in_mebibytes(nbytes: int) -> str:
    """Return bytes as Kubernetes writes them, rounded up.

    Example:
        >>> in_mebibytes(1 << 30), in_mebibytes(1)
        ('1024Mi', '1Mi')
    """
    return f"{-(-nbytes // MIB)}Mi"


def activation_bytes(config: RunConfig, size: ModelSize, tokens: int) -> float:
    """Return the bytes of the activations of one forward and backward pass over ``tokens``."""
    width = BYTES[config.learner.dtype_used]
    layer = WIDTHS * size.hidden + INNER_WIDTHS * size.inner
    if config.learner.gradient_checkpointing:
        return tokens * width * (layer + size.layers * size.hidden)
    return tokens * width * layer * size.layers


def frozen_policies(algorithm: AlgorithmConfig) -> int:
    """Return the number of further policies that the learner holds to compare with. A teacher counts as one of them.

    Example:
        >>> frozen_policies(AlgorithmConfig()), frozen_policies(AlgorithmConfig(kl=KlConvex()))
        (0, 2)
    """
    taught = int(algorithm.distillation is not None and not algorithm.distillation.remote)
    taught += algorithm.siblings is not None
    if isinstance(algorithm.kl, KlConvex):
        return 2 + taught
    compared = algorithm.kl is not None and algorithm.kl.to == "reference"
    return int(compared or algorithm.balances_trajectories) + taught


def tokens_at_once(config: RunConfig) -> int:
    """Return the most tokens of one forward and backward pass: those of a batch, or `learner.micro_batch_tokens`."""
    learner = config.learner
    batch = learner.batch_trajectories * learner.sampling.max_trajectory_tokens
    return min(learner.micro_batch_tokens, batch)


def in_words(found: list[RoleMemory]) -> str:
    """Return memory in words.

    Example:
        >>> in_words([RoleMemory("learner", 1, 3.3), RoleMemory("generator", 2, 1.75)])
        '6.8 GB (learner 3.3 GB, 2 generators 1.8 GB each)'
    """
    parts = [
        f"{share.role} {share.each_gb:.1f} GB"
        if share.processes == 1
        else f"{share.processes} {share.role}s {share.each_gb:.1f} GB each"
        for share in found
    ]
    return f"{total_gb(found):.1f} GB ({', '.join(parts)})"


def total_gb(found: list[RoleMemory]) -> float:
    """Return the memory of all processes, in GB."""
    return sum(share.processes * share.each_gb for share in found)


def estimate(config: RunConfig, size: ModelSize, there_gb: float) -> str:
    """Return a sentence on the memory that the run takes at most.

    Args:
        there_gb: memory of this host, in GB.

    Raises:
        ConfigError: the host has not even the memory that the run takes without any activations.
    """
    least = shares(config, size, tokens=0)
    if total_gb(least) > there_gb:
        raise ConfigError(
            f"the run takes at least {in_words(least)} of memory, but this host has {there_gb:.1f} GB; take a smaller "
            "model, fewer processes, or bfloat16 in learner.dtype and generator.dtype"
        )
    tokens = tokens_at_once(config)
    most = shares(config, size, tokens)
    text = f"memory: at most about {in_words(most)}, of {there_gb:.1f} GB of this host"
    if total_gb(most) <= there_gb:
        return text
    return f"{text}; if it runs short, lower learner.micro_batch_tokens, which lets {tokens} tokens through at once"


def estimate_beside_gpus(config: RunConfig, size: ModelSize, there_gb: float) -> str:
    """Return a sentence on the host's memory of a run whose learner and generators compute on GPUs.

    Args:
        there_gb: memory of this host, in GB.

    Raises:
        ConfigError: the host has not even memory for the policy versions, and for the weights while they are loaded.
    """
    learner, generator = config.learner, config.generator
    versions = versions_at_once(config) * version_bytes(config, size) / GB
    loads = size.parameters * BYTES[learner.dtype_used] / GB
    offloaded = learner.processes * offloaded_bytes(config, size) / GB
    engines = generator.count * generator.tensor_parallel_size if generator.backend == "vllm" else 0
    libraries = (learner.processes + engines) * GPU_LIBRARIES_GB + config.actor.count * LIBRARIES["actor"]
    asleep = sleeping_bytes(config, size) / GB
    least = versions + max(learner.processes * loads, offloaded) + asleep
    total = least + libraries + LIBRARIES["broker"]
    text = (
        f"{total:.1f} GB of memory beside the GPUs (policy versions {versions:.1f} GB, each rank of the learner "
        f"{loads:.1f} GB while it loads, {f'offloaded optimizer {offloaded:.1f} GB, ' if offloaded else ''}"
        f"{f'weights of sleeping engines {asleep:.1f} GB, ' if asleep else ''}libraries {libraries:.1f} GB)"
    )
    if least > there_gb:
        cure = "leave out learner.offload, " if offloaded else ""
        cure += "set generator.sleep_in_updates to false, " if asleep else ""
        raise ConfigError(
            f"the run takes about {text}, but this host has {there_gb:.1f} GB; lower learner.keep_versions, {cure}or "
            "take fewer ranks (learner.processes) or a smaller model"
        )
    tight = "; if it runs short, lower learner.keep_versions" if total > there_gb else ""
    return f"memory: about {text}, of {there_gb:.1f} GB of this host{tight}"


def host_gb(meminfo: Path = MEMINFO, limit: Path = CGROUP_LIMIT) -> float | None:
    """Return the memory of this host in GB, or the limit that its container sets; None if the system tells neither."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:"))
        found.append(int(line.split()[1]) * 1024 / GB)
    with contextlib.suppress(OSError, ValueError):
        found.append(int(limit.read_text()) / GB)
    return min(found, default=None)


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
    """Facts that torch tells of a visible GPU."""

    name: str = ""
    memory_gb: float | None = None
    """None: not known."""
    free_gb: float | None = None
    """Memory that no process held when it was asked. None: not known."""
    bfloat16: bool = True
    """True if it computes in bfloat16."""
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
        config: with every "auto" decided, see `launch.preflight.hardware`.
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
