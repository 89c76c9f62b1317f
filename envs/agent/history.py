"""The form in which messages of an agent's requests are compared. Pure.

Agents send the whole conversation with each request, and many spell the assistant's messages anew. Of eleven
harnesses that were recorded, three send them back byte for byte. So messages are compared in a canonical form:
absent, null and empty contents are the same, a list of text parts is the text, white space at both ends does not
count, the arguments of a tool call are compared as JSON values, and thoughts and the ids of calls are left out.
"""

import json
from collections.abc import Mapping
from typing import Any

from envs.errors import EnvError

Canonical = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the name and arguments of each tool call."""


def canonical(message: Mapping[str, Any]) -> Canonical:
    """Return the form in which messages are compared.

    Example:
        >>> call = {"id": "1", "function": {"name": "add", "arguments": '{"b":7,  "a": 12}'}}
        >>> canonical({"role": "assistant", "content": None, "tool_calls": [call]})
        ('assistant', '', (('add', '{"a": 12, "b": 7}'),))
        >>> canonical({"role": "user", "content": [{"type": "text", "text": " Hi"}]})
        ('user', 'Hi', ())
    """
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", {}) for call in calls]
    return (
        str(message["role"]),
        text_of(message.get("content")).strip(),
        tuple((str(f.get("name", "")), _arguments(f.get("arguments"))) for f in functions),
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, null, or a list of text parts.

    Raises:
        EnvError: a part is not text.

    Example:
        >>> text_of(None), text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
        ('', 'ab')
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type", "?") if isinstance(part, Mapping) else type(part).__name__
            raise EnvError(f"a message has a part of type {kind!r}; the policy reads text only")
    return "".join(part["text"] for part in parts)


def _arguments(arguments: Any) -> str:
    """Return arguments, which are JSON or a map, in one spelling; as they are if they are not JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return str(arguments).strip()
    try:
        return spelled(_value(arguments or {}))
    except RecursionError:
        return repr(type(arguments))


def _value(value: Any) -> Any:
    """Return a JSON value in which equal numbers are equal: other languages have one type for all of them.

    Example:
        >>> _value({"x": [1.0, True, 2**60]}) == _value({"x": [1, True, float(2**60)]})
        True
    """
    if isinstance(value, dict):
        return {key: _value(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_value(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return value
    return int(number) if number.is_integer() else number


def spelled(value: Any) -> str:
    """Return a JSON value as text; equal values have equal texts."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
