"""Looks at this host's GPUs, and decides the settings that the run file leaves to them."""

from typing import NamedTuple

from launch.errors import ConfigError
from launch.hardware import in_words, resolved
from launch.placement import JUDGE, LEARNER, VARIABLE, Placement, placement, unused_gpus, visible_gpus
from launch.preflight.gpu_memory import Gpu, too_little_gpu_memory
from launch.preflight.gpu_trial import try_gpus, unusable, without_bfloat16
from launch.preflight.memory import ModelSize
from launch.processes.kernel import usable_cores
from launch.run_file.sections import RunConfig


class Decided(NamedTuple):
    """A configuration with no setting left to the hardware, and remarks on its GPUs."""

    config: RunConfig
    remarks: list[str]


def decided(config: RunConfig, size: ModelSize | None) -> Decided:
    """Decide the settings of a run whose roles all share this host.

    Args:
        size: sizes of the model; None: not known.

    Raises:
        ConfigError: the layout is impossible, a GPU cannot be used, or its memory is too small.
    """
    visible = visible_gpus()
    return _decided(config, placement(config, len(visible)), len(visible), size)


def decided_by_hand(role: str, config: RunConfig) -> RunConfig:
    """Decide the settings of one role that gets the GPUs that the shell shows.

    Raises:
        ConfigError: the shell shows too few GPUs for the role, or one cannot be used.
    """
    there = len(visible_gpus())
    wanted = {
        "learner": {LEARNER: config.learner.processes},
        "generator": {"generator-0": config.generator.tensor_parallel_size}
        if config.generator.backend == "vllm"
        else {},
        "judge": {JUDGE: 1},
    }.get(role, {})
    if not wanted:
        return config
    shown = f"{there} GPU" if there == 1 else f"{there} GPUs"
    for post, count in wanted.items():
        if 0 < there < count:
            setting = "learner.processes" if post == LEARNER else "generator.tensor_parallel_size"
            raise ConfigError(
                f"{setting} is {count}, but this shell shows {shown}, and each process takes one of its own; lower "
                f"{setting}, or show more ({VARIABLE})"
            )
    # Devices in the run file are those of `offbeat train`.
    learner = config.learner.model_copy(update={"devices": ()})
    generator = config.generator.model_copy(update={"devices": ()})
    config = config.model_copy(update={"learner": learner, "generator": generator})
    posts = {post: tuple(range(count)) for post, count in wanted.items() if there}
    return _decided(config, Placement(posts), there, None).config


def _decided(config: RunConfig, placed: Placement, visible: int, size: ModelSize | None) -> Decided:
    gpus = try_gpus(visible) if placed.posts else []
    broken, broken_idle = unusable(placed, gpus)
    if broken:
        raise ConfigError("\n".join(broken))
    config = resolved(config, placed, gpus, size, usable_cores())
    refused, tight = too_little_gpu_memory(config, placed, gpus, size)
    if refused:
        raise ConfigError("\n".join(refused))
    remarks = [
        *unused_gpus(),
        *([placed.sentence()] if placed.posts else []),
        *in_words(config, placed),
        *cards(placed, gpus),
        *placed.remarks,
        *broken_idle,
        *without_bfloat16(placed, gpus),
        *tight,
    ]
    return Decided(config, remarks)


def cards(placed: Placement, gpus: list[Gpu]) -> list[str]:
    """Return a line for each kind of GPU in use, with its memory.

    Example:
        >>> placed = Placement({"learner": (0, 1), "generator-0": (2,)})
        >>> cards(placed, [Gpu("H200", 150.1), Gpu("H200", 150.1), Gpu("A100", 42.4)])
        ['GPU 0, 1: H200, 150.1 GB', 'GPU 2: A100, 42.4 GB']
    """
    kinds: dict[str, list[str]] = {}
    for place in placed.by_gpu():
        if place < len(gpus) and (memory_gb := gpus[place].memory_gb) is not None:
            kinds.setdefault(f"{gpus[place].name}, {memory_gb:.1f} GB", []).append(str(place))
    return [f"GPU {', '.join(places)}: {kind}" for kind, places in kinds.items()]
