"""The tools of an episode, and how a call of one becomes a result for the model."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envs.base import ToolSchema
from envs.errors import EnvError
from envs.tools.calls import Call
from envs.tools.loop_thread import LoopThread
from envs.tools.schema import schema_of

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of a class of tools that the model cannot call."""


class ToolError(Exception):
    """A tool answers a call with an error, which the model may read."""


@dataclass(frozen=True)
class Tool:
    """A tool with its schema.

    Attributes:
        schema: description for the chat template.
        run: runs a call with the arguments of the model. Blocks. What it raises becomes a text for the model.
    """

    schema: ToolSchema
    run: Callable[[dict[str, Any]], Any]

    @property
    def name(self) -> str:
        name: str = self.schema["function"]["name"]
        return name


@dataclass(frozen=True)
class CallOutcome:
    """Text that answers a call, and whether the call failed."""

    text: str
    failed: bool = False


def methods_of(kind: type, place: str) -> dict[str, ToolSchema]:
    """Return the schemas of the methods of a class that are tools, by name.

    Raises:
        EnvError: a method cannot be described, or the class has no tools.
    """
    schemas = {
        name: schema_of(method, f"{place}.{name}")
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    }
    if not schemas:
        raise EnvError(f"{place} has no tools: a tool is a public method with type hints and a docstring")
    return schemas


def local_tool(function: Callable[..., Any], schema: ToolSchema, loop: LoopThread, timeout_s: float) -> Tool:
    """Return a function of the user's as a tool. A coroutine runs in ``loop``, at most ``timeout_s``."""
    signature = inspect.signature(function)

    def run(arguments: dict[str, Any]) -> Any:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(str(error)) from None
        return finished(function(**arguments), loop, timeout_s)

    return Tool(schema, run)


def finished(result: Any, loop: LoopThread, timeout_s: float) -> Any:
    """Return the result of a user's function. Wait for it if the function is a coroutine function."""
    return loop.call(_await(result), timeout_s) if inspect.isawaitable(result) else result


async def _await(awaitable: Any) -> Any:
    return await awaitable


def answer(call: Call, tools: Mapping[str, Tool]) -> CallOutcome:
    """Run a call. An error becomes a text for the model, and never ends the episode.

    Raises:
        EnvError: neither the model nor its call is at fault, for example a server that has ended.

    Example:
        >>> answer(Call("ad", {"a": 1}), {"add": Tool({"function": {"name": "add"}}, print)})
        CallOutcome(text="Error: there is no tool 'ad'; the tools are: add", failed=True)
    """
    if call.error:
        return CallOutcome(f"Error: {call.error}", failed=True)
    tool = tools.get(call.name)
    if tool is None:
        return CallOutcome(
            f"Error: there is no tool {call.name!r}; the tools are: {', '.join(tools)}", failed=True
        )
    try:
        return CallOutcome(as_text(tool.run(call.arguments)))
    except EnvError:
        raise
    except ToolError as error:
        return CallOutcome(f"Error: {_clean(str(error))}", failed=True)
    except Exception as error:
        return CallOutcome(_clean(f"Error: {type(error).__name__}: {error}"), failed=True)


def as_text(result: Any) -> str:
    """Return the result of a tool as text: JSON unless it is text already.

    Example:
        >>> as_text("a"), as_text({"a": [1]}), as_text(None)
        ('a', '{"a": [1]}', 'null')
    """
    if isinstance(result, str):
        return _clean(result)
    try:
        return _clean(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _clean(str(result))


def _clean(text: str) -> str:
    """Return a text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
