"""The suite of tools: rows, a class or functions of the user, and MCP servers make a training job."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from envs.base import ChatMessage, Env, Split, SuiteFacts, ToolSchema
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.rows.prompts import RawPrompt
from envs.rows.reading import DataRow, shown_name
from envs.rows.reward_functions import (
    RewardFunction,
    check_columns,
    check_rows,
    close_judges,
    load_reward_functions,
    program_gauges,
)
from envs.rows.suite import RowsSuite
from envs.tools.episode import ENVIRONMENTS, OWN, CallCounts, ToolsEpisode, rewards_of
from envs.tools.mcp_server import McpServer
from envs.tools.toolbox import LoopThread, Tool, finished, local_tool, methods_of, schema_of
from envs.user_code import absolute_beside_run_file, code_beside_run_file, code_file, load_callable, nearest
from protocol.gauges import Gauge, table

GAUGES = table(
    [
        Gauge("tool_calls_total", "calls", "calls that the model wrote, of `tools`", "total"),
        Gauge("tool_calls_unreadable_total", "calls", "calls that could not be read", "total"),
        Gauge("tool_calls_failed_total", "calls", "calls whose tool is unknown or raised an error", "total"),
    ]
)
"""Gauges of the suite."""
UNUSED = "envs.tools.episode:unused"
OWN_LIMIT_S = 5.0
"""Time that a function which keeps a limit of its own is given beyond it."""
CLOSE_S = 20.0
"""Longest wait for the ends of all MCP servers."""


class ToolsSuite:
    """Suite whose model calls tools until it answers without a call. Each row is a task.

    Args:
        train: rows, as in the suite `rows`.
        tools: a class as ``file.py:Class``, whose public methods are tools, or a function; or a list of these with
            at most one class.
        mcp: MCP servers whose tools are offered: command lines, or URLs.
        reward: reward function, or a table of functions and judges, as in the suite `rows`. Empty: only
            ``get_reward`` of the class. A function in TRL's form may take ``environments``, a list with the object of
            the class.
        prompt, system, heldout, correct, solved_at, seed: as in the suite `rows`.
        max_turns: answers that an episode may have. The last one ends it, and its calls still run.
        call_timeout_s: longest time of a call of a coroutine function or an MCP server, in seconds. Then the model
            reads an error. A plain function has the limit ``actor.env_timeout_s``, which fails the episode.

    Raises:
        EnvError: a setting, a tool or a row is wrong, or a server does not start.
    """

    def __init__(
        self,
        train: str,
        tools: str | list[str] = "",
        mcp: list[str] | None = None,
        reward: str | dict[str, Any] = "",
        prompt: str = "prompt",
        system: str = "",
        heldout: str | float = 0.1,
        correct: str = "",
        solved_at: float = 1.0,
        seed: int = 0,
        max_turns: int = 8,
        call_timeout_s: float = 20.0,
    ) -> None:
        named = [tools] if isinstance(tools, str) else tools
        _check_texts(tools=named, mcp=mcp or [])
        _check_numbers(max_turns=max_turns, call_timeout_s=call_timeout_s)
        self._rows = RowsSuite(train, UNUSED, prompt, system, heldout, solved_at=solved_at, seed=seed)
        self._max_turns, self._timeout_s, self._solved_at = max_turns, call_timeout_s, solved_at
        self._counts, self._loop = CallCounts(), LoopThread()
        # Servers have a loop of their own, which no code of the user's can block.
        self._loop_of_servers = LoopThread()
        loaded: dict[str, ModuleType] = {}
        self._kind, self._methods, self._shared = self._load(named, loaded)
        columns = [*self._rows.columns["train"], ENVIRONMENTS]
        self._functions = load_reward_functions(reward, columns, shown_name(train), loaded) if reward else []
        if isinstance(heldout, str):
            columns = [*self._rows.columns["heldout"], ENVIRONMENTS]
            check_columns(self._functions, columns, shown_name(heldout))
        check_rows(self._functions, self._rows.rows())
        self._correct = _deciding_reward(correct, self._kind, self._functions)
        self._servers: list[McpServer] = []
        self._start(mcp or [])
        if not self._methods and not self._shared:
            raise EnvError(
                "params.tools: there are no tools; name a class, functions, or MCP servers in params.mcp"
            )

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        found = RowsSuite.find_files(params, folder)
        tools = found.get("tools")
        if isinstance(tools, str):
            found["tools"] = code_beside_run_file(tools, folder, absolute_beside_run_file)
        elif isinstance(tools, list):
            found["tools"] = [
                code_beside_run_file(t, folder, absolute_beside_run_file) if isinstance(t, str) else t
                for t in tools
            ]
        return found

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files that make the tasks, the rewards and the tools."""
        tools = params.get("tools")
        named = [tools] if isinstance(tools, str) else tools if isinstance(tools, list) else []
        return [*RowsSuite.files(params), *filter(None, map(code_file, named))]

    def episode(self) -> Env:
        return cast(Env, ToolsEpisode(self))

    def user(self) -> tuple[Any, dict[str, Tool]]:
        """Return a new object of the user's class, or None, and the tools of its episode by name."""
        user = None if self._kind is None else self._kind()
        own = {
            name: local_tool(getattr(user, name), schema, self._loop, self._timeout_s)
            for name, schema in self._methods.items()
        }
        return user, {**own, **self._shared}

    def begin(self, data: dict[str, Any]) -> tuple[DataRow, RawPrompt, list[ChatMessage]]:
        """Return the row of a task that begins, its prompt, and the first messages."""
        return self._rows.begin(*task_of(data))

    def score(
        self, user: Any, answer: str, row: DataRow, prompt: RawPrompt
    ) -> tuple[dict[str, float], bool | None]:
        """Return the rewards of an episode, and whether its task was solved. Blocks."""
        rewards = rewards_of(user, self._functions, answer, row, prompt, self.finish)
        decides = rewards.get(self._correct)
        return rewards, None if decides is None else decides >= self._solved_at

    def finish(self, result: Any, limit_s: float | None = None) -> Any:
        """Return the result of a user's function. Wait for it if the function is a coroutine function. Blocks.

        Args:
            limit_s: longest time that the function keeps itself; None: it keeps none.
        """
        # A function that keeps its limit says itself why it failed.
        limit_s = self._timeout_s if limit_s is None else limit_s + OWN_LIMIT_S
        return finished(result, self._loop, limit_s)

    @property
    def max_turns(self) -> int:
        return self._max_turns

    @property
    def counts(self) -> CallCounts:
        return self._counts

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Raise LookupError: a row does not say which calls solve it."""
        raise LookupError("the suite tools has no solutions with calls")

    def facts(self) -> SuiteFacts:
        """Return the number of held-out rows, the names of the rewards, and remarks for `offbeat check`."""
        facts = self._rows.facts()
        # What get_reward returns may have any names.
        names = None if hasattr(self._kind, "get_reward") else tuple(f.name for f in self._functions)
        return replace(facts, reward_names=names, mark_names=("calls",))

    def gauges(self) -> dict[str, float]:
        """Return counters of calls, and the epoch of the rows."""
        counts = self._counts
        return {
            **self._rows.gauges(),
            **program_gauges(self._functions),
            "tool_calls_total": counts.calls,
            "tool_calls_unreadable_total": counts.unreadable,
            "tool_calls_failed_total": counts.failed,
        }

    async def close(self) -> None:
        await asyncio.wait_for(asyncio.to_thread(self._stop), CLOSE_S)

    def _load(
        self, names: list[str], loaded: dict[str, ModuleType]
    ) -> tuple[type | None, dict[str, ToolSchema], dict[str, Tool]]:
        """Return the user's class, if any, its methods' schemas, and the functions that are tools."""
        kind: type | None = None
        methods: dict[str, ToolSchema] = {}
        shared: dict[str, Tool] = {}
        for name in filter(None, names):
            found = load_callable(name, "tool", loaded)
            if not inspect.isclass(found):
                schema = schema_of(found, name)
                self._add(shared, methods, local_tool(found, schema, self._loop, self._timeout_s), name)
            elif kind is not None:
                raise EnvError(
                    f"params.tools: {name} is a second class; an episode has one object, so name one class"
                )
            else:
                kind, methods = found, methods_of(found, name)
        return kind, methods, shared

    def _start(self, entries: list[str]) -> None:
        """Start the MCP servers, and add their tools. End all of them if one does not start."""
        try:
            for entry in entries:
                server = McpServer(entry, self._loop_of_servers, self._timeout_s)
                self._servers.append(server)
                for tool in server.tools:
                    self._add(self._shared, self._methods, tool, entry)
        except EnvError:
            self._stop()
            raise

    @staticmethod
    def _add(shared: dict[str, Tool], methods: dict[str, ToolSchema], tool: Tool, place: str) -> None:
        if tool.name in shared or tool.name in methods:
            raise EnvError(f"{place}: there is a tool {tool.name!r} already; rename one")
        shared[tool.name] = tool

    def _stop(self) -> None:
        for server in self._servers:
            server.close()
        if any(function.timeout_s is not None for function in self._functions):
            self.finish(close_judges(self._functions))
        self._loop.close()
        self._loop_of_servers.close()


def _check_texts(**lists: Any) -> None:
    for name, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise EnvError(f'params.{name} = {value!r}: write a list of texts, such as {name} = ["..."]')


def _check_numbers(**numbers: Any) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise EnvError(f"params.{name} = {number!r}: write a number above 0")


def _deciding_reward(correct: str, kind: type | None, functions: Sequence[RewardFunction]) -> str:
    """Return the name of the reward that says whether a task was solved; "" if none does.

    Raises:
        EnvError: there is no reward at all, or none of the name that the run file gives.
    """
    own = [OWN] if hasattr(kind, "get_reward") else []
    names = [*own, *(function.name for function in functions)]
    if not names:
        raise EnvError("params.reward: there is no reward: name a function, or give the class a get_reward()")
    if correct and not own and correct not in names:
        near = nearest(correct, names)
        raise EnvError(
            f"params.correct = {correct!r}: no reward has this name{near} (rewards: {', '.join(names)})"
        )
    return correct or (names[0] if len(names) == 1 else "")
