"""Makes the schema of a tool from a function's type hints and its docstring in Google's style. Pure."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from envs.base import ToolSchema
from envs.errors import EnvError

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
