"""Tries a run's folder, model and environment before anything starts, and refuses what could not work.

`offbeat check` and `offbeat train` call `examine`. It reads the tokenizer, the chat template and the model's
configuration, takes a few tasks of each split, and counts the tokens of their first prompts.
"""

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.errors import ActorError
from actors.render import Renderer
from envs.base import Split, SuiteFacts
from envs.errors import EnvError
from envs.registry import content_hash, make_suite
from envs.user_code import nearest
from launch.errors import ConfigError
from launch.gguf import is_gguf
from launch.known_models import KNOWN_MODELS
from launch.model import SMALL_FILES, existing, kept_model
from launch.preflight.adapters import try_adapters
from launch.preflight.decided import decided
from launch.preflight.memory import ModelSize, estimate, estimate_beside_gpus, host_gb, model_size
from launch.preflight.model_limits import (
    quantised,
    too_long_model,
    undivided_heads,
    without_experts,
)
from launch.preflight.notes import no_room_for_notes
from launch.preflight.room import too_little_room
from launch.preflight.trial import Prompt, Trial
from launch.run_file.described import context_of, read_description
from launch.run_file.family_rules import lacking
from launch.run_file.sections import RunConfig
from launch.run_folder import check_place
from learner.credit.needs import needed_marks, needed_rewards

TRAIN_TASKS = 8
"""Training tasks whose first prompts are counted; of held-out tasks only the first is."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Examined:
    """A configuration that was tried, and remarks on what is allowed but probably not meant."""

    config: RunConfig
    """The configuration: each "auto" is decided, and evaluation tasks are no more than there are held-out tasks."""
    remarks: list[str]
    memory: str = ""
    """Sentence on the memory that the run takes on this host; "" if that is not known."""


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
    folder = model_files(config)
    if config.judge is not None and config.judge.model:
        check_model_name("judge.model", config.judge.model)
    size = model_size(folder) if folder else None
    by_gpus = decided(config, size)
    config = by_gpus.config
    without_room, tight = too_little_room(config, size)
    renderer, context, described = None, None, dict[str, Any]()
    if folder is not None:
        try:
            special = config.model.special_tokens_in_messages
            renderer = Renderer(folder, config.model.template_args, special_in_messages=special)
        except ActorError as error:
            raise ConfigError(f"model.path: {error}") from None
        described = read_description(folder)
        context = context_of(described)
    facts, prompts, remarks, seen = asyncio.run(_try_environment(config, renderer))
    if problems := [
        *without_room,
        *too_long_model(config, context, folder),
        *undivided_heads(config, described),
        *quantised(described, folder),
        *without_experts(config, described, folder),
        *no_room(config, prompts, context),
        *(no_room_for_notes(config, prompts, renderer.encode) if renderer else ()),
        *unknown_rewards(config, facts),
        *missing_marks(config, facts),
        *lacking(config.learner, facts),
        *sets_without_tasks(config, facts),
        *shared_ports(config, facts),
    ]:
        raise ConfigError("\n".join(problems))
    remarks = [*remarks, *rewards_not_seen(config, facts, seen), *try_adapters(config, folder)]
    fitting, few = fitted(config, facts)
    content = content_hash(config.env.name, config.env.params)
    fitting = fitting.model_copy(update={"env": fitting.env.model_copy(update={"content": content})})
    told = memory(config, size)
    return Examined(
        fitting,
        [*by_gpus.remarks, *tight, *facts.remarks, *few, *remarks, *cut_answers(config, prompts)],
        told,
    )


def memory(config: RunConfig, size: ModelSize | None) -> str:
    """Return a sentence on the memory that the run takes of this host; "" if it is not known.

    Raises:
        ConfigError: the host has too little memory.
    """
    there_gb = host_gb()
    if size is None or there_gb is None:
        return ""
    beside_gpus = config.learner.devices or config.generator.devices
    return (estimate_beside_gpus if beside_gpus else estimate)(config, size, there_gb)


def fitted(config: RunConfig, facts: SuiteFacts) -> tuple[RunConfig, list[str]]:
    """Return the configuration with at most as many evaluation tasks as held-out tasks, and a remark on that."""
    there, wanted = facts.heldout_tasks, config.learner.evaluation_tasks
    if there is None or wanted <= there:
        return config, []
    learner = config.learner.model_copy(update={"evaluation_tasks": there})
    remark = f"learner.evaluation_tasks is {wanted}, but there are {there} held-out tasks: evaluations have {there}"
    return config.model_copy(update={"learner": learner}), [remark]


def sets_without_tasks(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of a named evaluation set that asks for more held-out tasks than there are."""
    for name, of in config.learner.evaluation.items():
        there = facts.heldout_by_env.get(of.env) if of.env else facts.heldout_tasks
        if there is not None and of.first_task + of.tasks > there:
            yield (
                f"learner.evaluation.{name} has the tasks {of.first_task} to {of.first_task + of.tasks - 1}, but there "
                f"are {there} held-out tasks; lower its tasks or first_task"
            )


def shared_ports(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of each port on which several actors, or several environments of one, would listen."""
    for port in sorted(set(facts.fixed_ports)):
        if config.actor.count > 1:
            yield (
                f"actor.count is {config.actor.count}, and each actor would listen on port {port} of this host, which "
                "only one process can; give port 0 in env.params.listen, so that each takes a free one, or set "
                "actor.count = 1"
            )
        elif facts.fixed_ports.count(port) > 1:
            yield (
                f"several [[env]] tables listen on port {port}; give each a port of its own, or port 0, in its "
                "params.listen"
            )


def unknown_rewards(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of each named reward that the environment does not have."""
    if (names := facts.reward_names) is None:
        return
    for field, name in needed_rewards(config.learner):
        if name not in names:
            what = "" if field.endswith(f".{name}") else f' is "{name}"'
            yield (
                f"{field}{what}: the environment has no reward of this name"
                f"{nearest(name, list(names))} (rewards: {', '.join(names)})"
            )


def rewards_not_seen(config: RunConfig, facts: SuiteFacts, seen: Collection[str]) -> Iterator[str]:
    """Yield a remark on each named reward that no tried answer got, if the environment does not list its rewards.

    A right answer may get rewards that an empty one does not, so this is no refusal.
    """
    if facts.reward_names is not None or not seen:
        return
    for field, name in needed_rewards(config.learner):
        if name not in seen:
            what = "" if field.endswith(f".{name}") else f' is "{name}"'
            yield (
                f"{field}{what}: the tried answers got no reward of this name{nearest(name, list(seen))} (rewards: "
                f"{', '.join(sorted(seen))}); if it is right, list it in SuiteFacts.reward_names"
            )


def missing_marks(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of each mark that the environment is known not to give."""
    if (names := facts.mark_names) is None:
        return
    for field, name in needed_marks(config.learner):
        if name not in names:
            yield (
                f'{field} needs the mark "{name}" of each turn, which the environment does not give (marks: '
                f"{', '.join(names) or 'none'}); add it to StepResult.marks (docs/extend/environments.md), or choose a "
                "method without it"
            )


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


def no_room(config: RunConfig, prompts: Sequence[Prompt], context: int | None) -> Iterator[str]:
    """Yield the refusal of prompts that leave no room for an answer; the longest is named."""
    sampling = config.learner.sampling
    most, longest = sampling.context_tokens, max(prompts, key=lambda p: p.tokens, default=None)
    if longest is None or longest.tokens < most:
        return
    needed = longest.tokens + sampling.max_turn_tokens
    others = [
        f"{field} (now {value})"
        for field, value in (
            ("generator.max_model_len", config.generator.max_model_len),
            ("learner.micro_batch_tokens", config.learner.micro_batch_tokens),
        )
        if value < needed
    ]
    where = f"{longest.task} has {longest.tokens} tokens"
    if context is not None and needed > context:
        yield f"{where}, and an answer needs {sampling.max_turn_tokens}, but the model takes {context}; shorten it"
        return
    yield (
        f"learner.sampling.{sampling.context_setting} is {most}, prompt included, but {where}, which leaves no room "
        f"for an answer; raise it{''.join(f' and {other}' for other in others)} to at least {needed}"
    )


def cut_answers(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a remark if prompts leave less room than the longest answer may take."""
    sampling = config.learner.sampling
    room = sampling.context_tokens - sampling.max_turn_tokens
    tight = [prompt for prompt in prompts if prompt.tokens > room]
    if tight:
        longest = max(tight, key=lambda prompt: prompt.tokens)
        yield (
            f"{longest.task} has {longest.tokens} tokens, so its answer is cut after "
            f"{sampling.context_tokens - longest.tokens} tokens, not after max_turn_tokens = "
            f"{sampling.max_turn_tokens}; learner.sampling.{sampling.context_setting} = "
            f"{longest.tokens + sampling.max_turn_tokens} would avoid that"
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
    finally:
        await trial.close()
    return facts, [prompt for prompt in prompts if prompt is not None], trial.remarks, trial.reward_names
