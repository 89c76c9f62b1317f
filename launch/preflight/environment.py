"""Tries an environment and the chat template behind it, and holds the run file against what both say of themselves.

Tasks are begun and one is answered before any role starts.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from actors.env_results import check_conversation, check_tools, finite_rewards
from actors.environments import EnvironmentRunner
from actors.errors import ActorError
from actors.render import Renderer
from envs.base import ChatMessage, Env, HasFacts, HasTools, Split, StepResult, Suite, SuiteFacts, ToolSchema
from envs.errors import EnvError, NotStarted
from envs.several import ENV
from envs.user_code import in_one_line, nearest
from launch.errors import ConfigError
from launch.run_file.sections import RunConfig
from learner.rewards import needed_marks, needed_rewards
from learner.selection import repeated_share, task_index
from learner.settings.advantages import ModesReward
from learner.settings.families import (
    HintFamily,
    JudgeFamily,
    ProposeFamily,
    RetryFamily,
    SteeredFamily,
    quoted_answers,
)
from learner.settings.learner import RESCUE_RULES, LearnerConfig
from learner.settings.selection import PopulationSelection, TaskList

_QUESTION: ChatMessage = {"role": "user", "content": "Question"}


def check_follow_ups(
    renderer: Renderer, seen: Sequence[ChatMessage], tools: Sequence[ToolSchema]
) -> list[str]:
    """Try the messages that may follow an answer. Return remarks on the template.

    Args:
        renderer: tokenizer and chat template of the model.
        seen: messages with which the environment answered; empty if it ended the episode.
        tools: schemas of the environment's tools. With tools, their results are tried, too.

    Raises:
        ConfigError: a second turn could not be rendered, or would not keep the tokens of the first.
    """
    remarks: list[str] = []
    if leaves_out_tools(renderer, tools):
        remarks.append(
            f"the chat template leaves out the tools, for example {tools[0]['function']['name']!r}; describe them in "
            "the prompt, with the form of a call"
        )
    if tools and renderer.calls.reader == "nobody":
        remarks.append(
            f"nobody reads the tool calls that the chat template writes, which begin with {renderer.calls.mark!r}: "
            "each of them reaches the environment as one that cannot be read; pip install '.[renderers]' brings "
            "readers for more models"
        )
    for messages in _follow_ups(seen, tools):
        try:
            remark = renderer.check_follow_up(messages, tools)
        except ActorError as error:
            raise ConfigError(f"env: the second turn of an episode: {error}") from None
        if remark and remark not in remarks:
            remarks.append(remark)
    return remarks


def leaves_out_tools(renderer: Renderer, tools: Sequence[ToolSchema]) -> bool:
    """Return whether the chat template writes nothing of the tools that it gets; False if there are none."""
    return bool(tools) and tools[0]["function"]["name"] not in renderer.text([_QUESTION], tools)


def check_tools_are_told(
    renderer: Renderer, prompt: Sequence[ChatMessage], tools: Sequence[ToolSchema], task: str
) -> None:
    """Check that a model can know its tools: by the chat template, or by the prompt.

    Args:
        prompt: first messages of the task.
        task: the task, for the error.

    Raises:
        ConfigError: the template leaves out the tools, and the prompt names none of them.
    """
    names = [tool["function"]["name"] for tool in tools]
    if leaves_out_tools(renderer, tools) and not any(n in m["content"] for n in names for m in prompt):
        raise ConfigError(
            f"env: the chat template leaves out the tools, for example {names[0]!r}, and the prompt of {task} does not "
            "name them, so the model cannot know them; take a model whose template writes tools, or describe them in "
            "the prompt, with the form of a call"
        )


def _follow_ups(seen: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> Iterator[Sequence[ChatMessage]]:
    if seen:
        yield seen
    for count in (1, 2) if tools else ():
        name = tools[0]["function"]["name"]
        yield [
            {"role": "tool", "content": "0", "name": name, "tool_call_id": f"call{number:05d}"}
            for number in range(count)
        ]


@dataclass(frozen=True)
class Prompt:
    """First prompt of a task, with its length in tokens."""

    split: Split
    index: int
    tokens: int
    place: str = ""
    """Where a person finds the task, if the suite says it."""

    @property
    def task(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"the first prompt of {self.split} task {self.index}{where}"


MODEL_TEXT = (
    "Let me think about this step by step.\n\nFirst, 12 + 30 = 42, because 10 + 30 = 40.\n\n```python\nprint(12 + 30)\n"
    "```\n\n<answer>So the answer is **42**: \\boxed{42}.</answer>\n\nThe answer is 42."
)
"""An answer of some length with the marks that models like: a sum, code, a tag, a box, and a number at its end."""


def _quoted(text: str) -> str:
    """Return a text between quotation marks, its beginning only if it is long."""
    return f'"{text}"' if len(text) <= 30 and text.isprintable() else ascii(f"{text[:30]}...")


class _StepRaised(ConfigError):
    """The environment's code raised an exception."""


class Trial:
    """Calls an environment as an actor does: in threads, with deadlines."""

    def __init__(self, config: RunConfig, suite: Suite, renderer: Renderer | None) -> None:
        self._params, self._limit_s, self._suite = config.env.params, config.actor.env_timeout_s, suite
        self._renderer = renderer
        self._runner = EnvironmentRunner(calls=1)
        self.remarks: list[str] = []
        self.reward_names: set[str] = set()
        """Names of the rewards that the tried answers got."""

    async def facts(self) -> SuiteFacts:
        """Return the facts of the suite. A suite may have something else of this name, which is left alone."""
        if not isinstance(self._suite, HasFacts) or not callable(self._suite.facts):
            return SuiteFacts()
        found = await self._ask(self._suite.facts, what="facts of the suite")
        return found if isinstance(found, SuiteFacts) else SuiteFacts()

    async def begin(self, split: Split, index: int, label: str = "") -> Prompt | None:
        """Begin one task; answer it, too, if it is the first of its split. Return None without a renderer.

        Args:
            label: of one environment of several, to which the task belongs; "": the index decides.
        """
        task = f"{split} task {index}" + (f" of {label}" if label else "")
        data = {"index": index, "split": split, **({ENV: label} if label else {})}
        env = await self._ask(self._suite.episode, what=f"episode of {task}", on_loop=True)
        try:
            messages = await self._ask(env.reset, data, what=f"reset of {task}")
            try:
                # An agent's tools are those of the request that waits, so they are asked for before it is answered.
                tools = await self._tools(env, task) if self._renderer is not None else ()
                tokens = self._count_tokens(messages, tools, task)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"env: the prompt of {task}: {in_one_line(error)}") from None
            failed = await self._answer(env, "", task, tools) if index == 0 else ""
        finally:
            await self._ask(env.close, what=f"close of {task}")
        if failed:
            await self._answer_anew(task, data, failed)
        if index == 0 and not isinstance(env, HasTools):
            await self._try_texts(split, task, data)
        return Prompt(split, index, tokens) if self._renderer is not None else None

    async def try_modes(self, modes: ModesReward) -> None:
        """Begin an answer with the opening of each mode. The tokenizer has to keep it, and the environment to know it.

        Raises:
            ConfigError: a mode could not act.
        """
        task = "train task 0"
        for mode, opening in modes.openings.items():
            field = f"learner.reward.group.openings.{mode} is {_quoted(opening)}"
            if self._renderer is not None:
                read = self._renderer.decode(self._renderer.encode(opening))
                if read != opening:
                    raise ConfigError(
                        f"{field}, which the tokenizer reads back as {_quoted(read)}; choose words that it keeps"
                    )
            env = await self._ask(self._suite.episode, what=f"episode of {task}", on_loop=True)
            try:
                await self._ask(env.reset, {"index": 0, "split": "train"}, what=f"reset of {task}")
                what = f"step({_quoted(opening)}) of {task}"
                result = await self._ask(env.step, opening, what=what)
            finally:
                await self._ask(env.close, what=f"close of {task}")
            _check_result(result, what)
            if (found := result.marks.get(modes.mark)) != mode:
                said = (
                    f"the mark {modes.mark!r} {found!r}" if found is not None else f"no mark {modes.mark!r}"
                )
                raise ConfigError(
                    f"{field}, but the environment gives an answer that begins so {said}; it has to read the opening, "
                    "and to say the mode in StepResult.marks (docs/extend/environments.md)"
                )

    async def first_prompts(self, indices: Iterable[int], *, seconds: float) -> list[str]:
        """Return the texts of the first prompts of training tasks, of as many as can be begun in a time.

        Args:
            indices: numbers of the tasks, in the order in which they are dealt; a number may come again.
        """
        texts: dict[int, str] = {}
        prompts: list[str] = []
        end = time.monotonic() + seconds
        for index in indices:
            if index not in texts:
                if time.monotonic() > end:
                    break
                task = f"train task {index}"
                env = await self._ask(self._suite.episode, what=f"episode of {task}", on_loop=True)
                try:
                    messages = await self._ask(
                        env.reset, {"index": index, "split": "train"}, what=f"reset of {task}"
                    )
                finally:
                    await self._ask(env.close, what=f"close of {task}")
                texts[index] = repr(messages)
            prompts.append(texts[index])
        return prompts

    def _count_tokens(self, messages: list[ChatMessage], tools: Sequence[ToolSchema], task: str) -> int:
        """Return the tokens of a first prompt, with the tools in it; 0 without a renderer."""
        if self._renderer is None:
            return 0
        tokens = len(self._renderer.prompt(messages, tools))
        check_tools_are_told(self._renderer, messages, tools, task)
        return tokens

    async def _tools(self, env: Env, task: str) -> Sequence[ToolSchema]:
        if not isinstance(env, HasTools):
            return ()
        what = f"tool_schemas of {task}"
        tools = await self._ask(env.tool_schemas, what=what, on_loop=True)
        named = isinstance(tools, list | tuple) and all(
            isinstance(tool, dict)
            and isinstance(tool.get("function"), dict)
            and isinstance(tool["function"].get("name"), str)
            for tool in tools
        )
        if not named:
            raise ConfigError(
                f"env: {what} returned {tools!r:.200}; it has to be a list of "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            )
        try:
            check_tools(tools, what)
        except ActorError as error:
            raise ConfigError(f"env: {error}") from None
        return cast(Sequence[ToolSchema], tools)

    async def _answer(self, env: Env, text: str, task: str, tools: Sequence[ToolSchema]) -> str:
        """Answer a task. Return the error that the environment raised, or "".

        Args:
            tools: schemas of the tools in the prompt that is answered.
        """
        what = f"step({_quoted(text)}) of {task}"
        try:
            result = await self._ask(env.step, text, what=what)
        except _StepRaised as error:
            return str(error)
        except NotStarted as error:
            self._remark(f"the rewards were not tried: {error}")
            return ""
        _check_result(result, what)
        self.reward_names.update(result.rewards)
        try:
            check_conversation(result.messages(), what)
        except ActorError as error:
            raise ConfigError(f"env: {error}") from None
        if self._renderer is not None:
            if result.tools and result.after is not None and result.after < 0:
                # A conversation of its own, with tools of its own.
                check_tools_are_told(self._renderer, result.messages(), result.tools, f"a request of {task}")
                tools = result.tools
            for remark in check_follow_ups(self._renderer, result.messages(), tools):
                self._remark(remark)
        return ""

    def _remark(self, remark: str) -> None:
        if remark not in self.remarks:
            self.remarks.append(remark)

    async def _answer_anew(self, task: str, data: dict[str, Any], failed: str) -> None:
        """Answer a task that could not take an empty answer with a short one, which must work."""
        env = await self._ask(self._suite.episode, what=f"episode of {task}", on_loop=True)
        try:
            await self._ask(env.reset, data, what=f"reset of {task}")
            tools = await self._tools(env, task) if self._renderer is not None else ()
            if again := await self._answer(env, "0", task, tools):
                raise ConfigError(again)
        finally:
            await self._ask(env.close, what=f"close of {task}")
        self.remarks.append(f"{failed}; an empty answer fails its episode")

    async def _try_texts(self, split: Split, task: str, data: dict[str, Any]) -> None:
        """Answer a task with its own solution, which must work, and with a text as models write it.

        Rewards may return early for an empty answer, and raise for what a model writes.
        """
        # One of several environments is asked for with the data of its task, and a solution by its number only.
        solution = "" if ENV in data else await self._solution(split, data["index"])
        if solution and (failed := await self._answer_alone(solution, task, data)):
            raise ConfigError(f"{failed}; this is the task's own solution")
        if failed := await self._answer_alone(MODEL_TEXT, task, data):
            self._remark(f"{failed}; such an answer fails its episode")

    async def _solution(self, split: Split, index: int) -> str:
        """Return the solution of a task of one turn; "" where there is none."""
        demonstration = getattr(self._suite, "demonstration", None)
        if demonstration is None:
            return ""
        try:
            messages = await self._ask(
                demonstration, index, split, what=f"demonstration of {split} task {index}"
            )
        except (ConfigError, NotStarted):
            # A suite need not have solutions.
            return ""
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return ""
        turns = [
            m.get("content") for m in messages if m.get("role") == "assistant" and not m.get("tool_calls")
        ]
        return turns[0] if len(turns) == 1 and isinstance(turns[0], str) else ""

    async def _answer_alone(self, text: str, task: str, data: dict[str, Any]) -> str:
        """Answer a task in an episode of its own. Return the error that the environment raised, or ""."""
        env = await self._ask(self._suite.episode, what=f"episode of {task}", on_loop=True)
        try:
            await self._ask(env.reset, dict(data), what=f"reset of {task}")
            return await self._answer(env, text, task, ())
        finally:
            await self._ask(env.close, what=f"close of {task}")

    async def close(self) -> None:
        try:
            await self._ask(self._suite.close, what="close of the suite")
        finally:
            self._runner.close()

    async def _ask(
        self, function: Callable[..., Any], *arguments: Any, what: str, on_loop: bool = False
    ) -> Any:
        try:
            return await self._runner.call(
                function, *arguments, what=what, timeout_s=self._limit_s, on_loop=on_loop
            )
        except NotStarted:
            raise
        except (EnvError, ActorError) as error:
            raise ConfigError(f"env: {what}: {error}") from None
        except Exception as error:
            raise _StepRaised(f"env: {what}: {in_one_line(error, self._params)}") from None


def _check_result(result: object, what: str) -> None:
    if not isinstance(result, StepResult):
        raise ConfigError(
            f"env: {what} returned a {type(result).__name__}; it has to be an envs.base.StepResult"
        )
    try:
        finite_rewards(result)
    except ActorError as error:
        raise ConfigError(f"env: {what}: {error}") from None


def fitted(config: RunConfig, facts: SuiteFacts) -> tuple[RunConfig, list[str]]:
    """Return the configuration with at most as many evaluation tasks as held-out tasks, and a remark on that."""
    there, wanted = facts.heldout_tasks, config.learner.evaluation_tasks
    if there is None or wanted <= there:
        return config, []
    learner = config.learner.model_copy(update={"evaluation_tasks": there})
    remark = f"learner.evaluation_tasks is {wanted}, but there are {there} held-out tasks: evaluations have {there}"
    return config.model_copy(update={"learner": learner}), [remark]


def part_of_the_tasks(config: RunConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield a remark on a list of tasks that is not all training tasks, each once."""
    selection, there = config.learner.selection, facts.train_tasks
    samples = config.learner.steps and config.learner.units_per_batch
    if not samples or not isinstance(selection, TaskList) or there is None or selection.tasks == there:
        return
    rest = (
        "the others are never dealt out"
        if selection.tasks < there
        else f"the numbers from {there} on are some of them again, whose answers are counted apart"
    )
    yield (
        f"learner.selection.tasks is {selection.tasks}, but there are {there} training tasks: {rest}; set it to "
        f"{there} to have each once"
    )


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


def lacking(learner: LearnerConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of a family that needs what the environment is known not to give."""
    family = learner.family
    if family is None:
        return
    if facts.own_prompts:
        yield (
            f'learner.family.kind is "{family.kind}", which needs a prompt of one growing conversation, but the '
            "environment writes every prompt itself; take [learner.family] out"
        )
    solutions = isinstance(family, SteeredFamily) and family.own
    if (isinstance(family, HintFamily) or solutions) and facts.hints is False:
        yield (
            f'learner.family.kind is "{family.kind}" but the environment gives no hints; add StepResult.hints '
            "(docs/extend/environments.md), which the suite rows does with env.params.hint = COLUMN and reasoning_gym "
            "with env.params.hints = true, or take [learner.family] out"
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


LEAST_REPEATED = 0.05
"""Share of groups whose prompts come again below which a rescue rule does practically nothing."""
MOST_GROUPS = 4_000
"""Most groups whose prompts are looked at."""
PROMPTS_S = 3.0
"""Longest time in which tasks are begun to compare their prompts."""


async def seldom_repeated(config: RunConfig, trial: Trial) -> list[str]:
    """Return a remark if prompts seldom come again while a success is kept, which a rescue rule needs."""
    learner = config.learner
    replay = learner.replay
    if replay is None or replay.rule not in RESCUE_RULES:
        return []
    kept = (replay.max_policy_lag + 1) * learner.publish_every * learner.units_per_batch
    groups = min(MOST_GROUPS, learner.steps * learner.units_per_batch)
    indices = (task_index(learner.selection, group, config.run.seed) for group in range(groups))
    prompts = await trial.first_prompts(indices, seconds=PROMPTS_S)
    share = repeated_share(prompts, kept)
    if len(prompts) < 2 or share >= LEAST_REPEATED:
        return []
    return [
        f'learner.replay.rule is "{replay.rule}", which rescues a group by a success of the same prompt, but prompts '
        f"come again in {share:.1%} of the first {len(prompts)} groups within the replay's age "
        f"(learner.replay.max_policy_lag = {replay.max_policy_lag}: {kept} groups); deal a list of tasks again and "
        'again with learner.selection.kind = "epochs" and learner.selection.tasks'
    ]


def unread_notes(config: RunConfig) -> list[str]:
    """Return a remark if a tiny model is to write what it was never shown: a judgement or a reflection."""
    family, tiny = config.learner.family, config.model.tiny
    if config.model.path or tiny is None or tiny.warm_start.lessons:
        return []
    if isinstance(config.learner.selection, PopulationSelection):
        return [
            'learner.selection.kind is "population", but the tiny model knows nothing except its task, so no '
            "instruction helps it; set model.tiny.warm_start.lessons = true, or take a language model"
        ]
    if isinstance(family, JudgeFamily) or (isinstance(family, RetryFamily) and family.reflection):
        what = "judgement" if isinstance(family, JudgeFamily) else "reflection"
        return [
            f'learner.family.kind is "{family.kind}", but the tiny model knows nothing except its task, so no {what} '
            "can be read; set model.tiny.warm_start.lessons = true, or take a language model"
        ]
    return []


_PLACE = re.compile(r"\{\w+\}")


def no_room_for_notes(
    config: RunConfig, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]]
) -> Iterator[str]:
    """Yield the refusal of a note that leaves no room for an answer behind the longest prompt.

    The answers in a note are taken to be as long as one turn may be.

    Args:
        config: with the family.
        prompts: first prompts that were tried; those of evaluations have no note.
        encode: turns text into tokens.
    """
    family, sampling, selection = config.learner.family, config.learner.sampling, config.learner.selection
    notes = {f"family.{name}": getattr(family, name, "") for name in ("note", "reflection")}
    if isinstance(selection, PopulationSelection):
        notes |= {
            f"selection.instructions.{place}": text for place, text in enumerate(selection.instructions)
        }
    if isinstance(config.learner.reward.group, ModesReward):
        openings = config.learner.reward.group.openings
        notes |= {f"reward.group.openings.{mode}": text for mode, text in openings.items()}
    longest = max((p for p in prompts if p.split == "train"), key=lambda p: p.tokens, default=None)
    if not any(notes.values()) or longest is None:
        return
    sizes = {name: len(encode("\n\n" + _PLACE.sub("", note))) for name, note in notes.items()}
    if isinstance(family, ProposeFamily):
        # The note quotes an instruction, which may be longer than an answer.
        longest_words = max(size for name, size in sizes.items() if name.startswith("selection."))
        sizes["family.note"] += max(0, longest_words - sampling.max_turn_tokens)
    words, name = max((size, name) for name, size in sizes.items())
    quoted = quoted_answers(family) * sampling.max_turn_tokens
    if longest.tokens < sampling.context_tokens <= longest.tokens + words + quoted:
        needed = longest.tokens + words + quoted + sampling.max_turn_tokens
        yield (
            f"learner.sampling.{sampling.context_setting} is {sampling.context_tokens}, prompt included, but "
            f"{longest.task} has {longest.tokens} tokens, the words of learner.{name} {words}, and the answers "
            f"in it up to {quoted}, which leaves no room for an answer; raise it, and generator.max_model_len, to "
            f"{needed} or more, or shorten the note"
        )
