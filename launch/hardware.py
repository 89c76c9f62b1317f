"""Settings that the run file leaves to the hardware ("auto"), decided from the GPUs of each process. Pure."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from actors.config import OWN_GPU_SHARE, GeneratorConfig
from launch.errors import ConfigError
from launch.placement import GENERATOR, LEARNER, Placement
from launch.preflight.gpu_memory import Gpu, engine_gb, rank_gb
from launch.preflight.memory import ModelSize, tokens_at_once
from launch.run_file.rules import stages_too_low
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
    if problems := list(stages_too_low(decided)):
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
    shared = any(post.startswith(GENERATOR) for post in placed.start_after(LEARNER))
    sleep = shared and config.run.mode == "sync" and config.learner.nodes == 1
    generators = [place for post, each in engines.items() if post.startswith(GENERATOR) for place in each]
    long = generators and size is not None and recompute_s(config, size.parameters) > RECOMPUTE_S
    return own.model_copy(
        update={
            "dtype": _dtype(places, gpus) if own.dtype == "auto" else own.dtype,
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
    requests = min(own.max_num_seqs, math.ceil(requests_at_once(config) / own.count))
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
    # Both cannot have what they need at most; `launch.preflight.gpu_memory` refuses what cannot work at all.
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
