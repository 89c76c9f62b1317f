"""The tools of an episode: the schema of each, and how a call of one becomes a result for the model.

A schema comes from a function's type hints and its docstring in Google's style. Coroutines of tools run on an event
loop in a thread of its own.
"""

import asyncio
import concurrent.futures
import inspect
import json
import operator
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Union, get_args, get_origin

from envs.base import ToolSchema
from envs.calls import Call
from envs.errors import EnvError, ServiceFailed
from envs.user_code import place_of_thread
from protocol.processes import end_loop

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def schema_of(function: Callable[..., Any], place: str) -> ToolSchema:
    """Return the schema of a function in the form that chat templates take.

    Args:
        function: function or method with a type hint for each argument, and a docstring. ``self`` is left out.
        place: where the function is defined, for errors.

    Raises:
        EnvError: the docstring or a type hint is missing, or a hint has no counterpart in JSON.

    Example:
        >>> def multiply(a: int, b: int = 2) -> int:
        ...     '''Multiply two numbers.
        ...
        ...     Args:
        ...         a: first factor.
        ...     '''
        >>> schema = schema_of(multiply, "here")["function"]
        >>> schema["description"], schema["parameters"]["properties"]["a"], schema["parameters"]["required"]
        ('Multiply two numbers.', {'type': 'integer', 'description': 'first factor.'}, ['a'])
    """
    doc = inspect.getdoc(function) or ""
    description, arguments = read_docstring(doc)
    if not description:
        raise EnvError(f"{place}: a tool needs a docstring that tells the model what it does")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise EnvError(f"{place}: its type hints cannot be read: {error}") from None
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise EnvError(
                f"{place}: argument {name!r} has to be a named one, because a model calls it by name"
            )
        if name not in hints:
            raise EnvError(f"{place}: argument {name!r} needs a type hint, for example {name}: str")
        properties[name] = json_type(hints[name], f"{place}: argument {name!r}")
        if name in arguments:
            properties[name]["description"] = arguments[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    named = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": named}


def json_type(hint: Any, place: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint.

    Raises:
        EnvError: the type has no counterpart in JSON.

    Example:
        >>> json_type(list[str], ""), json_type(int | None, "")
        ({'type': 'array', 'items': {'type': 'string'}}, {'type': 'integer', 'nullable': True})
        >>> json_type(Literal["up", "down"], "")
        {'type': 'string', 'enum': ['up', 'down']}
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        kinds = {_NAMES[type(value)] for value in inner if type(value) in _NAMES}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _union(inner, place)
    if origin is list:
        return {"type": "array", "items": json_type(inner[0], place)}
    if origin is dict:
        values = json_type(inner[1], place)
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    raise EnvError(
        f"{place} has the type {getattr(hint, '__name__', hint)!s}; a model writes JSON, so use str, int, float, bool, "
        "list[...], dict[...], Literal[...] or a union of these"
    )


def _union(inner: tuple[Any, ...], place: str) -> dict[str, Any]:
    members = [json_type(member, place) for member in inner if member is not type(None)]
    if len(members) == 1:
        schema = members[0]
    elif all(set(member) == {"type"} for member in members):
        schema = {"type": [member["type"] for member in members]}
    else:
        schema = {"anyOf": members}
    return schema | ({"nullable": True} if type(None) in inner else {})


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring, and the text of each argument under ``Args:``.

    Example:
        >>> read_docstring("Run it.\\n\\nArgs:\\n    command (str): what to run,\\n        in a shell.")
        ('Run it.', {'command': 'what to run, in a shell.'})
    """
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, name, margin = "", "", -1
    for line in doc.splitlines():
        if found := _SECTION.match(line):
            section, name, margin = found[1], "", -1
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            margin = indent if margin < 0 else margin
            # A line that is indented further goes on with the argument above it.
            if indent <= margin and (found := _ARGUMENT.match(line)):
                name = found[1]
                arguments[name] = found[2].strip()
            elif name:
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments


JOIN_S = 5.0
"""Longest wait for the thread to end."""
TURN_S = 3.0
"""A loop that does nothing else for this long is blocked."""


class LoopThread:
    """Event loop that runs in a daemon thread from its first use until `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls = set[concurrent.futures.Future[Any]]()
        # Invariant: the loop and its thread are made under this lock, because episodes use threads of their own.
        self._lock = threading.Lock()

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine to its end, and return its result. Blocks.

        If a coroutine blocks the loop, later calls get a new loop in a new thread.

        Raises:
            TimeoutError: it took longer than ``timeout_s``. It was cancelled.
            EnvError: it blocks the loop; the text names the line.
            ServiceFailed: another coroutine blocks the loop; the text names the line.
            Exception: the coroutine's own errors.
        """
        future, loop, thread = self._start(work)
        self._calls.add(future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ServiceFailed(
                "other code blocked all asynchronous tools, and this call was given up"
            ) from None
        except concurrent.futures.TimeoutError:
            if future.done():
                # The coroutine's own error.
                raise
            future.cancel()
            if _turns(loop):
                raise TimeoutError(f"it took longer than {timeout_s:g} s") from None
            # Ask before others get a new loop, because the blocking code may go on at any time.
            current, place = asyncio.current_task(loop), place_of_thread(frame_of(thread))
            self._abandon(loop)
            what = f"blocks all asynchronous tools at {place}; await there, or make it a plain function"
            own = current is not None and current.get_coro() is work
            # A coroutine may also block in a task that it started itself.
            if own or self._calls == {future}:
                raise EnvError(f"the tool {what}") from None
            raise ServiceFailed(f"other code {what}") from None
        finally:
            self._calls.discard(future)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._loop is loop:
                self._loop = self._thread = None
        # It ends if the blocking code ever does.
        loop.call_soon_threadsafe(loop.stop)

    def start(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Start a coroutine, and return the future of its result."""
        return self._start(work)[0]

    def _start(
        self, work: Coroutine[Any, Any, Any]
    ) -> "tuple[concurrent.futures.Future[Any], asyncio.AbstractEventLoop, threading.Thread]":
        with self._lock:
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), daemon=True, name="tools"
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop), self._loop, self._thread

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Blocks for at most `JOIN_S`."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(JOIN_S)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        end_loop(loop)


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost frame of a thread; None if it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def _turns(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop still runs callbacks. Blocks for at most `TURN_S`."""
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    return turned.wait(TURN_S)


MOST_SCHEMAS = 100
"""Schemas inside each other that a value is held to. A schema may refer to itself without end."""
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
    if why := misfit(call.arguments, tool.schema["function"].get("parameters")):
        return CallOutcome(_clean(f"Error: {why}"), failed=True)
    try:
        return CallOutcome(as_text(tool.run(call.arguments)))
    except EnvError:
        raise
    except ToolError as error:
        return CallOutcome(f"Error: {_clean(str(error))}", failed=True)
    except Exception as error:
        return CallOutcome(_clean(f"Error: {type(error).__name__}: {error}"), failed=True)


def misfit(value: Any, schema: Any, place: str = "", root: Any = None, depth: int = 0) -> str:
    """Return why a value does not fit a JSON schema, in words for the model; "" if it fits.

    The words of JSON Schema that tools use are read: types, enums, properties, items, bounds, alternatives and
    references inside the schema. Patterns and formats are not: a pattern could take any time.

    Args:
        place: where the value stands, for the text.
        root: the schema that references are relative to; None: this one.

    Example:
        >>> add = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        >>> misfit({"a": 1}, add), misfit({"a": "1"}, add), misfit({}, add)
        ('', "'a' is '1', and not of type integer", "missing a required argument: 'a'")
    """
    root = schema if root is None else root
    if schema is False:
        return f"{place or 'this'} must not be given"
    if not isinstance(schema, Mapping) or depth > MOST_SCHEMAS:
        return ""
    if isinstance(reference := schema.get("$ref"), str):
        return misfit(value, _referred(reference, root), place, root, depth + 1)
    shown = f"{place or 'the value'} is {value!r:.60}"
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    if types and not any(_is_of(value, kind) for kind in types):
        return f"{shown}, and not of type {' or '.join(map(str, types))}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{shown}, and not {schema['const']!r}"
    if isinstance(choices := schema.get("enum"), list) and not any(_same(value, one) for one in choices):
        return f"{shown}, and none of {', '.join(map(repr, choices)):.200}"
    for word in ("anyOf", "oneOf"):
        parts = schema.get(word)
        if isinstance(parts, list) and parts:
            whys = [misfit(value, part, place, root, depth + 1) for part in parts]
            if all(whys):
                return " or ".join(dict.fromkeys(whys))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if why := misfit(value, part, place, root, depth + 1):
            return why
    return _out_of_bounds(value, schema, shown) or _part_misfit(value, schema, place, root, depth)


def _part_misfit(value: Any, schema: Mapping[str, Any], place: str, root: Any, depth: int) -> str:
    """Return why a part of a map or a list does not fit."""
    if isinstance(value, dict):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if name not in value:
                return f"missing a required argument: {_inside(place, name)}"
        others = schema.get("additionalProperties", True)
        for name, part in value.items():
            if name not in properties and others is False:
                known = f"; the names are {', '.join(map(str, properties))}" if properties else ""
                return f"{_inside(place, name)} is unknown{known}"
            if why := misfit(part, properties.get(name, others), _inside(place, name), root, depth + 1):
                return why
    if isinstance(value, list):
        for number, part in enumerate(value):
            if why := misfit(part, schema.get("items", True), _inside(place, number), root, depth + 1):
                return why
    return ""


def _inside(place: str, name: Any) -> str:
    """Return the place of a part: a name at first, and what leads to it from there."""
    return f"{place}[{name!r}]" if place else repr(name)


def _out_of_bounds(value: Any, schema: Mapping[str, Any], shown: str) -> str:
    if _is_of(value, "number"):
        amount, words = value, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    elif isinstance(value, str):
        amount, words = len(value), ("minLength", "maxLength", "", "")
    elif isinstance(value, list):
        amount, words = len(value), ("minItems", "maxItems", "", "")
    else:
        return ""
    tests = (operator.lt, operator.gt, operator.le, operator.ge)
    for word, is_outside in zip(words, tests, strict=True):
        bound: Any = schema.get(word)
        if _is_of(bound, "number") and is_outside(amount, bound):
            return f"{shown}, outside of its bound {bound}"
    return ""


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value has a type of JSON Schema; of an unknown type, any value has it."""
    match kind:
        case "integer":
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}
    return isinstance(value, kinds[kind]) if kind in kinds else True


def _same(one: Any, other: Any) -> bool:
    """Return whether two values of JSON are equal; true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _referred(reference: str, root: Any) -> Any:
    """Return the schema that a reference inside a schema names; one that everything fits if there is none."""
    found = root
    for step in reference.removeprefix("#").strip("/").split("/") if reference not in ("#", "#/") else ():
        found = found.get(step) if isinstance(found, Mapping) else None
    return True if found is None or not reference.startswith("#") else found


def as_text(result: Any) -> str:
    """Return the result of a tool as text: JSON unless it is text already, or the bytes of one.

    Example:
        >>> as_text("a"), as_text({"a": [1]}), as_text(None), as_text(b"a")
        ('a', '{"a": [1]}', 'null', 'a')
    """
    if isinstance(result, str):
        return _clean(result)
    if isinstance(result, bytes | bytearray):
        return bytes(result).decode("utf-8", "replace")
    try:
        return _clean(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _clean(str(result))


def _clean(text: str) -> str:
    """Return a text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
