"""Looks at this host's GPUs, tries them, and decides the settings that the run file leaves to them ("auto").

``python -m launch.preflight.hardware COUNT`` tries the GPUs in a process of its own, which leaves them when it ends.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from actors.config import OWN_GPU_SHARE, GeneratorConfig
from launch.errors import ConfigError
from launch.placement import (
    GENERATOR,
    JUDGE,
    LEARNER,
    VARIABLE,
    Placement,
    placement,
    unused_gpus,
    visible_gpus,
)
from launch.preflight.memory import Gpu, ModelSize, engine_gb, rank_gb, tokens_at_once, too_little_gpu_memory
from launch.processes import usable_cores
from launch.run_file.sections import RunConfig
from learner.settings.learner import LearnerConfig

CONTEXT_SHARE = 0.05
"""Share of a GPU's memory that nobody is given where it is shared: CUDA and NCCL need memory besides tensors."""
ASLEEP_SHARE = 0.03
"""Share of a GPU's memory that a sleeping engine keeps: CUDA, its libraries and graphs. Estimated, not measured."""
KEPT_MARGIN = 1.1
"""Factor on the estimate of what a rank keeps between updates, because nobody has measured how far it is off."""
GPU_OPERATIONS_PER_S = 4e14
"""Operations in a second with which a GPU reads prompts in bfloat16. Estimated for an H100, not measured."""
SMALL_PARAMETERS = 20_000_000
"""Parameters below which a model's layers are too small to be divided among threads."""
RECOMPUTE_S = 1.0
"""Time of each update above which running requests keep their KV cache."""


def resolved(
    config: RunConfig,
    placed: Placement,
    gpus: Sequence[Gpu] = (),
    size: ModelSize | None = None,
    cores: int = 1,
) -> RunConfig:
    """Return the configuration with every "auto" decided, and with the GPUs that each role has.

    A role without a GPU gets the settings of a CPU. Values that the run file gives stay as they are.

    Args:
        placed: GPUs of the processes.
        gpus: what is known of the visible GPUs; may be empty.
        size: sizes of the model; None: not known.
        cores: cores of the host.

    Raises:
        ConfigError: a shared GPU has no memory left for the learner, or the values do not go together.
    """
    engines = {post: places for post, places in placed.posts.items() if post != LEARNER}
    ranks = placed.posts.get(LEARNER, ())
    each = threads(config, placed, size, cores)
    learner = _learner(config.learner, ranks, gpus, each)
    generator = _generator(config, placed, gpus, size, each)
    decided = config.model_copy(update={"learner": learner, "generator": generator})
    if problems := list(decided.learner.stages_too_low("learner")):
        raise ConfigError("\n".join(problems))
    share, rest = memory_shares(decided, placed, gpus, size)
    if engines:
        generator = generator.model_copy(update={"gpu_memory_utilization": share})
    if ranks:
        learner = learner.model_copy(update={"gpu_memory_utilization": rest})
    return decided.model_copy(update={"learner": learner, "generator": generator})


def _dtype(places: Sequence[int], gpus: Sequence[Gpu]) -> Literal["float32", "bfloat16"]:
    """Return the float type of a role with these GPUs. Of a GPU that nothing is known of, expect bfloat16."""
    known = [gpus[place] for place in places if place < len(gpus)]
    return "bfloat16" if places and all(gpu.bfloat16 for gpu in known) else "float32"


def threads(config: RunConfig, placed: Placement, size: ModelSize | None, cores: int) -> int:
    """Return the OpenMP threads of each process that computes on the CPU: an equal part of the cores, at least 1.

    Learner and generators take turns in lockstep, but the threads that wait spin for a moment, so they share the
    cores there, too. Ranks on GPUs count where their optimizer steps on the CPU.

    Args:
        size: sizes of the model; None: not known.
    """
    if size is None or size.parameters < SMALL_PARAMETERS:
        return 1
    learner, generator = config.learner, config.generator
    ranks = learner.processes if LEARNER not in placed.posts or learner.offload != "none" else 0
    here = generator.backend == "vllm" and not any(post.startswith(GENERATOR) for post in placed.posts)
    engines = generator.count * generator.tensor_parallel_size if here else 0
    return max(1, cores // (ranks + engines)) if ranks + engines else 1


def _learner(own: LearnerConfig, ranks: Sequence[int], gpus: Sequence[Gpu], threads: int) -> LearnerConfig:
    dtype = _dtype(ranks, gpus) if own.dtype == "auto" else own.dtype
    steps_here = not ranks or own.offload != "none"
    chosen = (threads if steps_here else 1) if own.threads == "auto" else own.threads
    own = own.model_copy(update={"dtype": dtype, "threads": chosen})
    if not ranks:
        return own
    return own.model_copy(update={"zero_stage": own.zero_stage_used, "devices": tuple(ranks)})


def _generator(
    config: RunConfig,
    placed: Placement,
    gpus: Sequence[Gpu],
    size: ModelSize | None,
    threads: int,
) -> GeneratorConfig:
    own = config.generator
    engines = {post: places for post, places in placed.posts.items() if post != LEARNER}
    places = [place for each in engines.values() for place in each]
    # Generators of other hosts alone are expected to have GPUs like the learner's.
    typed = places or (() if own.count else placed.posts.get(LEARNER, ()))
    shared = any(post.startswith(GENERATOR) for post in placed.start_after(LEARNER))
    sleep = shared and config.run.mode == "sync" and config.learner.nodes == 1
    generators = [place for post, each in engines.items() if post.startswith(GENERATOR) for place in each]
    long = generators and size is not None and recompute_s(config, size.parameters) > RECOMPUTE_S
    return own.model_copy(
        update={
            "dtype": _dtype(typed, gpus) if own.dtype == "auto" else own.dtype,
            "threads": (1 if places else threads) if own.threads == "auto" else own.threads,
            "enforce_eager": not places if own.enforce_eager == "auto" else own.enforce_eager,
            "kv_on_update": ("kept" if long else "recomputed")
            if own.kv_on_update == "auto"
            else own.kv_on_update,
            "devices": tuple(dict.fromkeys(generators)) or own.devices,
            "sleep_in_updates": sleep if own.sleep_in_updates == "auto" else own.sleep_in_updates,
        }
    )


def recompute_s(config: RunConfig, parameters: int) -> float:
    r"""Return how long a generator on GPUs would compute its running requests again, in seconds at each update.

    .. math:: \frac{2 N \cdot R \cdot L / 2}{G \cdot S}

    N are the parameters, R the requests that run at a time, L the longest trajectory (they are half done on
    average), G the GPUs of a generator, S `GPU_OPERATIONS_PER_S`.
    """
    own = config.generator
    requests = min(own.max_num_seqs, math.ceil(requests_at_once(config) / max(1, own.count)))
    tokens = requests * config.learner.sampling.context_tokens / 2
    return 2 * parameters * tokens / (GPU_OPERATIONS_PER_S * own.tensor_parallel_size)


def requests_at_once(config: RunConfig) -> int:
    """Return the most requests that actors send at a time: one for each episode that is under way."""
    learner = config.learner
    members = learner.largest_group if learner.train_on == "groups" else 1
    in_work = (config.max_policy_lag + 1) * learner.units_per_batch * members
    evaluated = max((of.answers for of in learner.evaluation_sets.values()), default=0)
    return min(config.actor.count * config.actor.concurrent_episodes, in_work + evaluated)


def memory_shares(
    config: RunConfig, placed: Placement, gpus: Sequence[Gpu] = (), size: ModelSize | None = None
) -> tuple[float, float]:
    """Return the shares of a GPU's memory that an engine and a rank of the learner may take.

    On a shared GPU each process gets what it is estimated to need, and an equal part of the rest. Where the need is
    not known, all parts are equal.

    Raises:
        ConfigError: the engines of a GPU leave no memory for the learner.
    """
    stated, limit = config.generator.gpu_memory_utilization, config.learner.gpu_memory_utilization
    asleep = placed.sleepers(config)
    shared = {place: posts for place, posts in placed.by_gpu().items() if len(posts) > 1}
    each = [
        _engines_part(config, posts, gpus[place] if place < len(gpus) else Gpu(), size, sleep=bool(asleep))
        for place, posts in shared.items()
    ]
    share = math.floor(100 * min([OWN_GPU_SHARE, *each])) / 100 if isinstance(stated, str) else stated
    beside = [[post for post in posts if post != LEARNER] for posts in shared.values() if LEARNER in posts]
    kept = max(
        (sum(ASLEEP_SHARE if post in asleep else share for post in posts) for posts in beside), default=0.0
    )
    left = 1.0 - CONTEXT_SHARE - kept if beside else 1.0
    if left <= 0 and isinstance(limit, str):
        raise ConfigError(
            f"generator.gpu_memory_utilization is {share:g}, which leaves the learner nothing of a GPU that it shares "
            'with an engine; lower it, or set it to "auto"'
        )
    return share, round(left, 2) if isinstance(limit, str) else limit


def _engines_part(
    config: RunConfig, posts: Sequence[str], gpu: Gpu, size: ModelSize | None, *, sleep: bool
) -> float:
    """Return the share of a GPU's memory that each engine on it gets.

    Args:
        sleep: whether engines sleep while the learner updates. While they are awake it keeps what it needs in any case.
    """
    engines = [post for post in posts if post != LEARNER]
    whole = OWN_GPU_SHARE if LEARNER not in posts else 1.0 - CONTEXT_SHARE
    if not engines:
        return OWN_GPU_SHARE
    if LEARNER not in posts or gpu.memory_gb is None or size is None:
        return whole / len(posts)
    engine = engine_gb(config, size) / gpu.memory_gb
    rank = rank_gb(config, size, 0 if sleep else tokens_at_once(config)) / gpu.memory_gb
    rest = whole - len(engines) * engine - rank
    if rest > 0 and sleep:
        return max(engine, (whole - KEPT_MARGIN * rank) / len(engines))
    if rest > 0:
        return engine + rest / len(posts)
    # Both cannot have what they need at most; `launch.preflight.memory` refuses what cannot work at all.
    return max(0.01, whole * engine / (len(engines) * engine + rank))


def in_words(config: RunConfig, placed: Placement) -> Iterator[str]:
    """Yield what was decided for the roles that have GPUs; nothing without GPUs.

    Args:
        config: as `resolved` returned it.
    """
    learner, generator = config.learner, config.generator
    if LEARNER in placed.posts:
        limit = learner.gpu_memory_utilization
        part = "" if isinstance(limit, str) or limit == 1.0 else f", {limit:g} of the GPU's memory"
        yield f"learner: {learner.dtype_used}, ZeRO stage {learner.zero_stage_used}{part}"
    if len(placed.posts) > (LEARNER in placed.posts):
        sleeps = ", asleep while the learner updates" if placed.sleepers(config) else ""
        graphs = "not compiled" if generator.enforce_eager_used else "compiled, with CUDA graphs"
        yield (
            f"generators: {generator.dtype_used}, {graphs}, {generator.gpu_memory_utilization_used:g} of the GPU's "
            f"memory, KV cache {generator.kv_on_update_used} at updates{sleeps}"
        )


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


def decided_on_host(config: RunConfig, host: str, size: ModelSize | None) -> Decided:
    """Decide the settings of the generators and actors of a further host, where no learner runs.

    Args:
        host: name of the host.
        size: sizes of the model; None: not known.

    Raises:
        ConfigError: the layout is impossible, a GPU cannot be used, or its memory is too small.
    """
    visible = visible_gpus()
    return _decided(config, placement(config, len(visible), host), len(visible), size)


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


TRY_S = 180.0
OLDEST_BFLOAT16 = 8
"""First major version of the compute capability that computes in bfloat16 (Ampere)."""


def try_gpus(count: int) -> list[Gpu]:
    """Return what torch tells of the visible GPUs; without torch, that nothing is known.

    A process of its own asks, because the caller may live as long as the run and must not hold a GPU.

    Args:
        count: number of visible GPUs.

    Raises:
        ConfigError: the GPUs do not answer within `TRY_S`.
    """
    if not count:
        return []
    command = [sys.executable, "-m", "launch.preflight.hardware", str(count)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the GPUs have not answered for {TRY_S:g} s; look at nvidia-smi, or set {VARIABLE} to those that work"
        ) from None
    return read_answer(done.stdout, count)


def read_answer(text: str, count: int) -> list[Gpu]:
    """Return the GPUs that the last line of an answer describes; if there is no such line, that nothing is known.

    Example:
        >>> read_answer('[{"name": "A100", "memory_gb": 42.0}]', 1)[0].memory_gb
        42.0
        >>> read_answer("", 2)[1].memory_gb is None
        True
    """
    try:
        return [Gpu(**found) for found in json.loads(text.strip().rpartition("\n")[2])]
    except (ValueError, TypeError):
        return [Gpu()] * count


def unusable(placed: Placement, gpus: Sequence[Gpu]) -> tuple[list[str], list[str]]:
    """Return a line for each GPU that a process has and torch cannot use, and one for each such GPU that is idle."""
    used = placed.by_gpu()
    refused: list[str] = []
    idle: list[str] = []
    for place, gpu in enumerate(gpus):
        if gpu.trouble:
            line = f"GPU {place} cannot be used: {gpu.trouble}"
            cure = f"; mend that (nvidia-smi shows the driver), or set {VARIABLE} to the GPUs that work"
            (refused if place in used else idle).append(f"{line}{cure if place in used else ''}")
    return refused, idle


def without_bfloat16(placed: Placement, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield the GPUs in use that do not compute in bfloat16, so that their roles compute in float32."""
    for place in placed.by_gpu():
        if place < len(gpus) and not gpus[place].bfloat16:
            yield f"GPU {place} ({gpus[place].name}) does not compute in bfloat16: its roles compute in float32"


def ask(count: int) -> list[dict[str, Any]]:
    """Compute on each visible GPU, and return the fields of a `Gpu` for each."""
    import torch

    found: list[dict[str, Any]] = []
    for place in range(count):
        try:
            # A card that a driver lists may still lack kernels for it in this build of torch.
            torch.ones(1, device=f"cuda:{place}").add_(1).item()
            about = torch.cuda.get_device_properties(place)
            free, _ = torch.cuda.mem_get_info(place)
        except (RuntimeError, AssertionError) as error:
            found.append({"trouble": " ".join(str(error).split())[:400]})
            continue
        found.append(
            {
                "name": about.name,
                "memory_gb": about.total_memory / 1e9,
                "free_gb": free / 1e9,
                "bfloat16": about.major >= OLDEST_BFLOAT16,
            }
        )
    return found


def main() -> None:
    """Print what torch tells of the visible GPUs, as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight.hardware", description=main.__doc__)
    parser.add_argument("count", type=int)
    sys.stdout.write(json.dumps(ask(parser.parse_args().count)) + "\n")


if __name__ == "__main__":
    main()
