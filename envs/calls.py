"""Finds the tool calls in an answer, in the forms that models are trained on. Pure.

The forms: ``<tool_call>`` with JSON (Qwen, Hermes), with ``<function=...>`` (Qwen3.5) or with ``<arg_key>`` (GLM);
a bare JSON object (Llama 3); ``[TOOL_CALLS]`` (Mistral); DeepSeek's and gpt-oss's special tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.base import ToolSchema

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_HARMONY = re.compile(
    r"to=functions\.([\w.-]+)[^{]*?<\|message\|>(.*?)(?=<\|call\|>|<\|end\|>|<\|start\|>|\Z)", re.DOTALL
)
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n?```<｜tool▁call▁end｜>", re.DOTALL
)
_MISTRAL = "[TOOL_CALLS]"
_BARE = re.compile(r"(?:<\|python_tag\|>)?\s*(\{.*\})\s*(?:<\|eom_id\|>|<\|eot_id\|>)?", re.DOTALL)


_BEGINNINGS = ("<tool_call>", "<function=", "to=functions.", "<｜tool▁call", "[TOOL_CALLS]", "<|python_tag|>")


@dataclass(frozen=True)
class Call:
    """A call that the model wrote. With ``error`` it could not be read; ``name`` may then be empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def find_calls(answer: str, tools: Mapping[str, ToolSchema]) -> list[Call]:
    """Return the tool calls of an answer, in its order. Calls inside a thought do not count.

    Args:
        answer: text of the turn, special tokens included.
        tools: schemas of the tools, by name.

    Example:
        >>> find_calls('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>', {})
        [Call(name='add', arguments={'a': 1}, error='')]
        >>> find_calls("The answer is 7.", {})
        []
    """
    text = without_thought(answer)
    if "<tool_call>" in text:
        return [_block(body, bool(end), tools) for body, end in _BLOCK.findall(text)]
    for form in (_HARMONY, _DEEPSEEK):
        if found := form.findall(text):
            return [_from_json(body, name.strip()) for name, body in found]
    if _MISTRAL in text:
        return list(_mistral(text.partition(_MISTRAL)[2]))
    if bare := _BARE.fullmatch(text.strip()):
        call = _from_json(bare[1])
        # A bare object may also be the answer, so it is a call only if it names a tool.
        return [call] if not call.error and call.name in tools else []
    return []


def begins_call(text: str) -> bool:
    """Return whether the markup of a call begins in a text, in a form that `find_calls` knows.

    Example:
        >>> begins_call("<function=add>"), begins_call("The answer is 7.")
        (True, False)
    """
    return any(beginning in text for beginning in _BEGINNINGS)


def without_thought(answer: str) -> str:
    """Return an answer without its thought. A thought that is not closed goes to the end.

    Example:
        >>> without_thought("<think>hm</think>yes"), without_thought("hm</think>yes"), without_thought("<think>hm")
        ('yes', 'yes', '')
    """
    return answer.rpartition("</think>")[2].partition("<think>")[0]


def _block(body: str, closed: bool, tools: Mapping[str, ToolSchema]) -> Call:
    """Read the inside of ``<tool_call>``."""
    body = body.strip()
    if not closed:
        return Call("", error="the call has no </tool_call>")
    if found := _FUNCTION.fullmatch(body):
        return _typed(found[1], dict(_PARAMETER.findall(found[2])), tools)
    if "<arg_key>" in body:
        return _typed(body.partition("<arg_key>")[0].strip(), dict(_PAIR.findall(body)), tools)
    if body and not body.startswith("{") and body in tools:
        return Call(body)
    return _from_json(body)


def _from_json(body: str, name: str = "") -> Call:
    """Read a call from JSON: the call as a whole, or only its arguments if the name is known already."""
    try:
        content = json.loads(body, strict=False) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        return Call(name, error=f"the call is not JSON: {error}")
    if not isinstance(content, dict):
        return Call(name, error="the call is not a JSON object")
    return Call(name, content) if name else _from_object(content)


def _from_object(content: dict[str, Any]) -> Call:
    name = content.get("name")
    if not isinstance(name, str) or not name:
        return Call("", error='the call has no "name"')
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):
        return _from_json(arguments, name)
    if not isinstance(arguments, dict):
        return Call(name, error='"arguments" is not a JSON object')
    return Call(name, arguments)


def _mistral(body: str) -> Iterator[Call]:
    try:
        listed, _ = json.JSONDecoder(strict=False).raw_decode(body.strip())
    except (ValueError, RecursionError) as error:
        yield Call("", error=f"the calls are not JSON: {error}")
        return
    for content in listed if isinstance(listed, list) else [listed]:
        if isinstance(content, dict):
            yield _from_object(content)
        else:
            yield Call("", error="the call is not a JSON object")


def _typed(name: str, values: Mapping[str, str], tools: Mapping[str, ToolSchema]) -> Call:
    """Return a call whose arguments were written as text. The tool's schema says which are not text."""
    function = tools.get(name, {}).get("function", {})
    properties = function.get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for key, text in values.items():
        arguments[key] = text
        schema = properties.get(key)
        if not isinstance(schema, dict) or schema.get("type") != "string":
            try:
                arguments[key] = json.loads(text)
            except (ValueError, RecursionError):
                continue
    return Call(name, arguments)
