"""Says whether a request of an agent continues its conversation, and which messages are new. Pure.

Agents send the whole conversation with each request, and many spell the assistant's messages anew. Of eleven
harnesses that were recorded, three send them back byte for byte. So messages are compared in a canonical form:
absent, null and empty contents are the same, a list of text parts is the text, white space at both ends does not
count, the arguments of a tool call are compared as JSON values, and thoughts and the ids of calls are left out.

What the policy sampled keeps its tokens, however it was spelled on its way back.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from envs.errors import EnvError

Canonical = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the name and arguments of each tool call."""
Sent = TypeVar("Sent", bound=Mapping[str, Any])
SHOWN = 120
"""Characters of a message that an error shows."""


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


class History:
    """The messages of one conversation, as far as they are known.

    Example:
        >>> history = History([{"role": "user", "content": "2 + 2?"}], tools=[])
        >>> history.answered({"role": "assistant", "content": "4"})
        >>> told = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": " 4\\n"}]
        >>> history.new_messages([*told, {"role": "user", "content": "And 3 + 3?"}], tools=[])
        [{'role': 'user', 'content': 'And 3 + 3?'}]
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> None:
        self._known = [canonical(message) for message in messages]
        self._tools = _spelled(tools)

    def answered(self, message: Mapping[str, Any]) -> None:
        """Note the answer that the agent was given."""
        self._known.append(canonical(message))

    def new_messages(self, messages: Sequence[Sent], tools: Sequence[Any]) -> list[Sent]:
        """Return the messages behind the last answer, and note them.

        Raises:
            EnvError: the request does not continue the conversation; the text says where it parts from it.
        """
        if _spelled(tools) != self._tools:
            raise EnvError(_broken("it has other tools than the first request"))
        found = [canonical(message) for message in messages]
        for at, (known, sent) in enumerate(zip(self._known, found, strict=False)):
            if known != sent:
                raise EnvError(_broken(f"message {at + 1} was {_shown(known)}, and is now {_shown(sent)}"))
        if len(found) <= len(self._known):
            raise EnvError(
                _broken(f"it has {len(found)} messages and nothing behind the last of {len(self._known)}")
            )
        new = list(messages[len(self._known) :])
        self._known = found
        return new


def _broken(why: str) -> str:
    return (
        f"a request of the agent does not continue its conversation: {why}. An agent has one conversation per episode, "
        "which only grows; turn off titles, summaries and windows"
    )


def _arguments(arguments: Any) -> str:
    """Return arguments, which are JSON or a map, in one spelling; as they are if they are not JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return str(arguments).strip()
    return _spelled(_value(arguments or {}))


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


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shown(message: Canonical) -> str:
    role, text, calls = message
    whole = f"{role}: {text}" + "".join(f" [{name} {arguments}]" for name, arguments in calls)
    return repr(whole if len(whole) <= SHOWN else whole[:SHOWN] + "...")
