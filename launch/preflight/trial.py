"""Tries an environment before any role starts: begins tasks, answers one, and tries the chat template behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from actors.env_results import check_conversation, finite_rewards
from actors.environments import EnvironmentRunner
from actors.errors import ActorError
from actors.render import Renderer
from envs.base import ChatMessage, Env, HasFacts, HasTools, Split, StepResult, Suite, SuiteFacts, ToolSchema
from envs.errors import EnvError, NotStarted
from envs.several import ENV
from envs.user_code import in_one_line
from launch.errors import ConfigError
from launch.preflight.follow_ups import check_follow_ups
from launch.run_file.sections import RunConfig


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
                tokens = await self._count(env, messages, task)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"env: the prompt of {task}: {in_one_line(error)}") from None
            failed = await self._answer(env, "", task) if index == 0 else ""
        finally:
            await self._ask(env.close, what=f"close of {task}")
        if failed:
            await self._answer_anew(task, data, failed)
        return Prompt(split, index, tokens) if self._renderer is not None else None

    async def _count(self, env: Env, messages: list[ChatMessage], task: str) -> int:
        """Return the tokens of a first prompt, with the tools in it; 0 without a renderer."""
        if self._renderer is None:
            return 0
        return len(self._renderer.prompt(messages, await self._tools(env, task)))

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
        return cast(Sequence[ToolSchema], tools)

    async def _answer(self, env: Env, text: str, task: str) -> str:
        """Answer a task. Return the error that the environment raised, or ""."""
        what = f'step("{text}") of {task}'
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
            tools = await self._tools(env, task)
            remarks = check_follow_ups(self._renderer, result.messages(), tools)
            for remark in remarks:
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
            if again := await self._answer(env, "0", task):
                raise ConfigError(again)
        finally:
            await self._ask(env.close, what=f"close of {task}")
        self.remarks.append(f"{failed}; an empty answer fails its episode")

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
