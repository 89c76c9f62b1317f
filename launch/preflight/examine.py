"""Tries a run's folder, room, model and environment before anything starts, and refuses what could not work.

`offbeat check` and `offbeat train` call `examine`. It reads the tokenizer, the chat template and the model's
configuration, takes a few tasks of each split, and counts the tokens of their first prompts.
"""

import asyncio
import importlib.util
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.render import Renderer
from envs.base import Split, SuiteFacts
from envs.errors import EnvError
from envs.registry import content_hash, make_suite
from launch.conversations import hash_of_file, readable, renderer_of
from launch.errors import ConfigError
from launch.model import KNOWN_MODELS, SMALL_FILES, existing, is_gguf, kept_model, tiny_teacher
from launch.preflight.environment import (
    Prompt,
    Trial,
    cut_answers,
    fitted,
    lacking,
    missing_marks,
    no_room,
    no_room_for_notes,
    part_of_the_tasks,
    rewards_not_seen,
    seldom_repeated,
    sets_without_tasks,
    shared_ports,
    unknown_rewards,
    unread_notes,
)
from launch.preflight.hardware import decided, requests_at_once
from launch.preflight.memory import (
    GB,
    ModelSize,
    estimate,
    estimate_beside_gpus,
    host_gb,
    model_size,
    shared_words,
    version_bytes,
    versions_at_once,
)
from launch.preflight.model_limits import (
    quantised,
    too_long_model,
    too_many_experts,
    try_adapters,
    undivided_heads,
    without_experts,
)
from launch.preflight.trial_process import NoAnswer, ask
from launch.run_file.load import context_of, read_description
from launch.run_file.sections import RunConfig
from launch.run_folder import check_place
from learner.formulas import hash_of
from learner.run_files import SHARED_MEMORY
from learner.settings.advantages import ModesReward
from learner.settings.formulas import own_formulas, with_own_formulas
from learner.settings.given import Conversations
from learner.settings.trackers import missing_packages

CHECKPOINT_BYTES = 12
"""Bytes on disk for each trained parameter: float32 weights and AdamW's two averages."""
MODEL_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes on disk for each parameter of a written model."""
CHECKPOINTS_AT_ONCE = 3
"""Checkpoints on disk at a time: two that are kept, and the one that is being written."""


def too_little_room(
    config: RunConfig, size: ModelSize | None, shared: Path = SHARED_MEMORY
) -> tuple[list[str], list[str]]:
    """Return what has no room on this host, and what may have none, a line each with the setting to change.

    Args:
        config: with every "auto" decided.
        size: sizes of the model; None: not known, and then only the places in the engines are looked at.
        shared: folder in shared memory, in which policy versions lie.
    """
    refused: list[str] = []
    tight = list(crowded_engines(config))
    if size is not None:
        for problems, lines in (_versions(config, size, shared), _disk(config, size)):
            refused += problems
            tight += lines
    return refused, tight


def crowded_engines(config: RunConfig) -> Iterator[str]:
    """Yield a remark if actors may send more requests at a time than the generators run."""
    own, sent = config.generator, requests_at_once(config)
    places = own.max_num_seqs * own.count
    if own.backend == "vllm" and own.count and sent > places:
        yield (
            f"actors may send {sent} requests at a time, but the generators run {places} (generator.max_num_seqs x "
            "generator.count): the others wait in the engines. If it slows the run, raise max_num_seqs, or lower "
            "actor.concurrent_episodes"
        )


def unreachable_for_hosts(config: RunConfig) -> Iterator[str]:
    """Yield remarks if this host leaves roles to other hosts, which cannot do their part.

    A process that is started by hand on this host can, so this is no mistake.
    """
    here = {"generator": config.generator.count, "actor": config.actor.count}
    if all(here.values()):
        return
    absent = " and ".join(f"{role}.count = 0" for role, count in here.items() if not count)
    if config.no_other_hosts:
        yield (
            f"{absent}, but other hosts cannot reach broker.endpoint = {config.broker.endpoint}; set it to an address "
            "of this host and a fixed port, for example tcp://10.0.0.5:5755"
        )
    elif not config.generator.count and not config.weights.http:
        yield (
            f"{absent}, but weights.http is empty, so generators on other hosts would stay at version 0; set it to an "
            "address of this host, for example 10.0.0.5:5757"
        )


def _versions(config: RunConfig, size: ModelSize, shared: Path) -> tuple[list[str], list[str]]:
    if not shared.is_dir():
        return [], []
    count, each_gb = versions_at_once(config), version_bytes(config, size) / GB
    usage = shutil.disk_usage(shared)
    what = f"{count} policy versions of {each_gb:.1f} GB lie in {shared} at a time"
    cure = (
        "make it larger (in a container with --shm-size), lower learner.keep_versions, or set learner.publish_dtype "
        "to bfloat16"
    )
    if count * each_gb > usage.total / GB:
        return [f"{what}, but it has {usage.total / GB:.1f} GB; {cure}"], []
    if count * each_gb > usage.free / GB:
        return [], [f"{what}, and {usage.free / GB:.1f} of its {usage.total / GB:.1f} GB are free; {cure}"]
    return [], []


def _disk(config: RunConfig, size: ModelSize) -> tuple[list[str], list[str]]:
    """Return what the run folder's disk has no room for at all, and what it has no room for at a time."""
    learner = config.learner
    if not learner.steps:
        return [], []
    folder = config.run.dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free_gb, parts = shutil.disk_usage(there).free / GB, disk_parts(config, size)
    cure = "free some space, or choose another run.dir"
    for part in parts:
        if part.each_gb > free_gb:
            return [
                f"a {part.what} takes about {in_gb(part.each_gb)}, and {there} has {in_gb(free_gb)} free; {cure}"
            ], []
    if sum(part.all_gb for part in parts) > free_gb:
        return [], [f"{disk_words(parts)}, but {there} has {in_gb(free_gb)} free; {cure}"]
    return [], []


@dataclass(frozen=True)
class DiskPart:
    """Folders of one kind that a run leaves on the disk."""

    what: str
    count: int
    """Folders of this kind at a time, at most."""
    each_gb: float

    @property
    def all_gb(self) -> float:
        return self.count * self.each_gb


def disk_parts(config: RunConfig, size: ModelSize) -> list[DiskPart]:
    """Return the checkpoints and models that a run leaves in its folder. Journal, logs and metrics are not in it."""
    learner = config.learner
    model_gb = MODEL_BYTES[learner.dtype_used] * size.parameters / GB
    # With adapters a checkpoint has only theirs, which are small beside the model.
    checkpoint_gb = 0.0 if learner.lora is not None else CHECKPOINT_BYTES * size.parameters / GB
    often = learner.steps // learner.checkpoint_every if learner.checkpoint_every else 0
    exports = learner.steps // learner.export_every if learner.export_every else 0
    # The best model before stays until a checkpoint knows of the better one.
    best = 2 if learner.keep_best and learner.evaluation_sets else 0
    parts = [
        DiskPart("checkpoint", min(CHECKPOINTS_AT_ONCE, often + 1), checkpoint_gb),
        DiskPart("model at the end", 1, model_gb),
        DiskPart("best model", best, model_gb),
        DiskPart("exported model", exports, model_gb),
    ]
    return [part for part in parts if part.all_gb]


def disk_words(parts: Sequence[DiskPart]) -> str:
    """Return what a run leaves on the disk, in words.

    Example:
        >>> disk_words([DiskPart("checkpoint", 3, 1.6), DiskPart("model at the end", 1, 0.54)])
        'the run folder takes up to 5.3 GB (checkpoint 3 x 1.6 GB, model at the end 540 MB)'
    """
    each = (
        f"{part.what} {f'{part.count} x ' if part.count > 1 else ''}{in_gb(part.each_gb)}" for part in parts
    )
    return f"the run folder takes up to {in_gb(sum(part.all_gb for part in parts))} ({', '.join(each)})"


def in_gb(size_gb: float) -> str:
    """Return a size in words.

    Example:
        >>> in_gb(1.62), in_gb(0.0035)
        ('1.6 GB', '4 MB')
    """
    return f"{size_gb:.1f} GB" if size_gb >= 1 else f"{math.ceil(size_gb * 1000)} MB"


TRAIN_TASKS = 8
"""Training tasks whose first prompts are counted; of held-out tasks only the first is."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Examined:
    """A configuration that was tried, and remarks on what is allowed but probably not meant."""

    config: RunConfig
    """The configuration: each "auto" is decided, and evaluation tasks are no more than there are held-out tasks."""
    remarks: list[str]
    memory: tuple[str, ...] = ()
    """Sentences on the memory that the run takes on this host, and on /dev/shm in a container; empty if not known."""


def preflight(config: RunConfig) -> list[str]:
    """Return the remarks of `examine`."""
    return examine(config).remarks


def examine(config: RunConfig) -> Examined:
    """Try run folder, model and environment. Return the configuration to run, and remarks.

    A tiny model that is not made yet has no tokenizer, so only its environment is tried.

    Raises:
        ConfigError: the run folder, the model or the environment cannot be used, or the lengths do not fit;
            one line each.
    """
    check_place(config)
    own_remarks = try_formulas(config)
    folder = model_files(config)
    if config.judge is not None and config.judge.model:
        check_model_name("judge.model", config.judge.model)
    check_teacher(config)
    size = model_size(folder) if folder else None
    by_gpus = decided(config, size)
    config = by_gpus.config
    without_room, tight = too_little_room(config, size)
    renderer = renderer_of(config, folder) if folder else None
    described: dict[str, Any] = read_description(folder) if folder else {}
    context = context_of(described)
    undelivered, queued = too_many_experts(config, described)
    facts, prompts, remarks, seen = asyncio.run(_try_environment(config, renderer))
    if problems := [
        *without_trackers(config),
        *without_room,
        *too_long_model(config, context, folder),
        *undivided_heads(config, described),
        *quantised(described, folder),
        *without_experts(config, described, folder),
        *undelivered,
        *no_room(config, prompts, context),
        *(no_room_for_notes(config, prompts, renderer.encode) if renderer else ()),
        *unknown_rewards(config, facts),
        *missing_marks(config, facts),
        *lacking(config.learner, facts),
        *sets_without_tasks(config, facts),
        *shared_ports(config, facts),
    ]:
        raise ConfigError("\n".join(problems))
    if renderer is not None and config.learner.conversations is not None:
        remarks = [*remarks, *readable(config, renderer)[1]]
    remarks = [*remarks, *rewards_not_seen(config, facts, seen), *try_adapters(config, folder)]
    fitting, few = fitted(config, facts)
    content = content_hash(config.env.name, config.env.params)
    learner = with_own_formulas(
        fitting.learner, lambda own: own.model_copy(update={"content": hash_of(own.kind)})
    )
    learner = learner.with_sections(
        lambda part: (
            part.model_copy(update={"content": hash_of_file(part.file)})
            if isinstance(part, Conversations)
            else part
        )
    )
    env = fitting.env.model_copy(update={"content": content})
    fitting = fitting.model_copy(update={"env": env, "learner": learner})
    told = [memory(config, size), shared_words(config, size) if size else ""]
    return Examined(
        fitting,
        [
            *own_remarks,
            *by_gpus.remarks,
            *unreachable_for_hosts(config),
            *tight,
            *queued,
            *facts.remarks,
            *few,
            *part_of_the_tasks(config, facts),
            *remarks,
            *cut_answers(config, prompts),
        ],
        tuple(filter(None, told)),
    )


def without_trackers(config: RunConfig) -> Iterator[str]:
    """Yield a line for each tracker whose package is not installed here, where a learner can run.

    An evaluation writes to none. TensorBoard comes with the learner.
    """
    if not config.learner.steps or importlib.util.find_spec("torch") is None:
        return
    for name in missing_packages([name for name in config.run.trackers if name != "tensorboard"]):
        yield f"run.trackers names {name}, whose package is not installed: pip install '.[{name}]'"


def try_formulas(config: RunConfig) -> list[str]:
    """Try formulas of the user's own on made-up tokens and trajectories, and return remarks.

    Raises:
        ConfigError: a formula cannot be loaded, or returned what cannot be trained.
    """
    if not any(own_formulas(config.learner, "learner")):
        return []
    try:
        found = ask("learner.update.formula_probe", text=config.learner.model_dump_json())
    except NoAnswer as error:
        raise ConfigError(f"[learner]: formulas of your own could not be tried: {error}") from None
    if found.wrong:
        raise ConfigError("\n".join(found.wrong))
    return found.remarks


def memory(config: RunConfig, size: ModelSize | None) -> str:
    """Return sentences on what the run takes of this host's memory and of the disk; "" if that is not known.

    Raises:
        ConfigError: the host has too little memory.
    """
    there_gb = host_gb()
    if size is None or there_gb is None:
        return ""
    beside_gpus = config.learner.devices or config.generator.devices
    told = (estimate_beside_gpus if beside_gpus else estimate)(config, size, there_gb)
    parts = disk_parts(config, size) if config.learner.steps else []
    return f"{told}; {disk_words(parts)}" if parts else told


def model_files(config: RunConfig) -> Path | None:
    """Return a folder with the model's small files, or None for a tiny model that is not made yet.

    Raises:
        ConfigError: the model's path names nothing that a model can be made of.
    """
    path = config.model.path
    if not path:
        return kept_model(config)
    check_model_name("model.path", path)
    return existing(config.model, SMALL_FILES)


def check_teacher(config: RunConfig) -> None:
    """Check that a teacher which the learner holds can be found, or made.

    Raises:
        ConfigError: it cannot.
    """
    teacher = config.learner.algorithm.distillation
    if teacher is None or teacher.remote:
        return
    if teacher.tiny:
        tiny_teacher(config)
    else:
        check_model_name("learner.algorithm.distillation.teacher", teacher.teacher)


def check_model_name(setting: str, path: str) -> None:
    """Check that a setting names a folder, a GGUF file, a known model, or what may be a name on the hub.

    Raises:
        ConfigError: it names none of them.
    """
    named = Path(path).is_dir() or path in KNOWN_MODELS or is_gguf(path)
    if not named and not HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"{setting} is {path!r}: there is no such folder, and a name on the hub has the form NAME/NAME, "
            f"for example Qwen/Qwen3-0.6B; without a hub there are {', '.join(KNOWN_MODELS)}, and GGUF files"
        )


async def _try_environment(
    config: RunConfig, renderer: Renderer | None
) -> tuple[SuiteFacts, list[Prompt], list[str], set[str]]:
    """Begin some tasks of each split, answer the first with an empty text, and count the first prompts.

    Returns:
        The facts of the suite, the prompts, remarks, and the names of the rewards that the answers got.

    Raises:
        ConfigError: the environment cannot be made, raises an exception, or returns something unusable.
    """
    try:
        suite = make_suite(config.env.name, config.env.params)
    except EnvError as error:
        raise ConfigError(f"env: {error}") from None
    trial = Trial(config, suite, renderer)
    tasks: list[tuple[Split, int]] = [("train", index) for index in range(TRAIN_TASKS)]
    sets = [of for of in config.learner.evaluation_sets.values() if not of.env]
    evaluated = max((of.first_task + of.tasks for of in sets), default=0)
    try:
        facts = await trial.facts()
        if evaluated and facts.heldout_tasks != 0:
            tasks.append(("heldout", 0))
        prompts = [await trial.begin(split, index) for split, index in tasks]
        for of in config.learner.evaluation.values():
            if of.env:
                prompts.append(await trial.begin("heldout", of.first_task, of.env))
        for split, index, place in facts.longest_tasks:
            # Held-out tasks that no evaluation has are never begun.
            if split == "train" or index < evaluated:
                prompt = await trial.begin(split, index)
                prompts.append(prompt and replace(prompt, place=place))
        if isinstance(config.learner.reward.group, ModesReward):
            await trial.try_modes(config.learner.reward.group)
        remarks = [] if facts.own_prompts else await seldom_repeated(config, trial)
    finally:
        await trial.close()
    remarks = [*trial.remarks, *remarks, *unread_notes(config)]
    return facts, [prompt for prompt in prompts if prompt is not None], remarks, trial.reward_names
