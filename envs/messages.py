"""Reads messages in OpenAI's chat format, for rows, tools and agents: one form, whoever wrote them. Pure.

A content may be a text, null or a list of text parts, and becomes a text. The arguments of a call may be JSON text, as
in that format, or values; they become values, because chat templates write them as JSON themselves. A key without a
value is left out: tables give every message the keys of all others, and templates write what they find.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from envs.base import ChatMessage
from envs.errors import EnvError

_KEPT = ("tool_call_id", "name")


def message_of(message: Any, *, whole: bool = False) -> ChatMessage:
    """Return a message as environments write it: a text as content, arguments of calls as values.

    Args:
        message: a map with a role.
        whole: keep other keys that have a value, which a chat template may know, such as `reasoning_content`.

    Raises:
        EnvError: it has no role, a part that is not text, or a call without a name.

    Example:
        >>> message_of({"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": None})
        {'role': 'system', 'content': 'Be brief.'}
        >>> call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        >>> message_of({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"][0]["function"]
        {'name': 'add', 'arguments': {'a': 1}}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise EnvError(f"a message has no role: {message!r:.200}")
    role = "system" if message["role"] == "developer" else message["role"]
    made: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise EnvError(f'"tool_calls" is {calls!r:.200}; give a list')
    if calls:
        made["tool_calls"] = [_call_of(call) for call in calls]
    for key, value in message.items():
        if key not in ("role", "content", "tool_calls") and value is not None:
            if key in _KEPT and not isinstance(value, str):
                continue
            if whole or key in _KEPT:
                made[key] = value
    return cast(ChatMessage, made)


def join(last: ChatMessage, part: ChatMessage) -> None:
    """Put a part of a message behind another: their texts, and their calls.

    Example:
        >>> message: ChatMessage = {"role": "assistant", "content": "I add. "}
        >>> join(message, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]})
        >>> message
        {'role': 'assistant', 'content': 'I add. ', 'tool_calls': [{'id': '1'}]}
    """
    last["content"] += part["content"]
    if calls := part.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]


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


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of maps that have no value, as tables fill them in.

    Example:
        >>> without_nulls([{"role": "user", "name": None, "tool_calls": [{"arguments": {"a": 1, "b": None}}]}])
        [{'role': 'user', 'tool_calls': [{'arguments': {'a': 1}}]}]
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _call_of(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EnvError(f"a tool call has no function with a name: {call!r:.200}")
    given = function.get("arguments")
    kept = {key: value for key, value in function.items() if value is not None}
    return {"id": call.get("id"), "type": "function", "function": {**kept, "arguments": _values(given)}}


def _values(arguments: Any) -> Any:
    """Return the arguments of a call as values. A text that is not JSON stays: a model may have written it so."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
