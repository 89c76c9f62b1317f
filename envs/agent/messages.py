"""Requests and answers of the route `/v1/messages`, in the form of Anthropic's API. Pure.

A message is a text or a list of blocks here. Results of tools are blocks of the user's messages, and become messages of
their own. Thoughts are left out, and so is what harnesses add to a request for billing and caching, because it differs
between requests of one conversation.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envs.agent.chat import (
    ChatRequest,
    Reply,
    demands_call,
    fields_ignored,
    fields_of,
    limit_in,
    settings_in,
    stops_in,
    tool_of,
)
from envs.base import ChatMessage, ToolSchema
from envs.errors import EnvError
from envs.messages import join, message_of, text_of

BILLING = "x-anthropic-billing-header"
"""Beginning of a system text that differs with each request; it is a header for Anthropic's own servers."""
THOUGHTS = ("thinking", "redacted_thinking")


@dataclass(frozen=True)
class MessagesRequest(ChatRequest):
    """A request of this route."""

    thinks: bool = False
    """True if the agent asks for thoughts. Others expect that an answer begins with its text."""


def parse_messages_request(body: bytes) -> MessagesRequest:
    """Return the request in a body. Fields that are not known are ignored, as sampling parameters are.

    Raises:
        EnvError: the body is no such request, or asks for what cannot be had.

    Example:
        >>> body = b'{"system": "Be brief.", "messages": [{"role": "user", "content": "2 + 2?"}]}'
        >>> parse_messages_request(body).messages
        [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """
    content = fields_of(body)
    given = content.get("messages")
    if not isinstance(given, list) or not given:
        raise EnvError('the body has no "messages"')
    messages: list[ChatMessage] = []
    if system := _system(content.get("system")):
        messages.append({"role": "system", "content": system})
    for message in given:
        _add(messages, message)
    if messages[-1]["role"] == "assistant":
        raise EnvError(
            "the last message is the assistant's: the policy writes whole turns, it continues none"
        )
    return MessagesRequest(
        messages=messages,
        tools=_tools(content),
        model=str(content.get("model", "")),
        stop=stops_in(content, "stop_sequences", alone=False),
        stream=bool(content.get("stream")),
        usage=True,
        max_tokens=limit_in(content),
        settings=settings_in(content),
        demands_call=demands_call(content),
        fields_ignored=fields_ignored(content, "messages", "system", "stop_sequences", "thinking"),
        thinks=(content.get("thinking") or {}).get("type", "disabled") != "disabled",
    )


def _system(system: Any) -> str:
    parts = system if isinstance(system, list) else [system]
    return "".join(text for part in parts if not (text := _text(part)).startswith(BILLING))


def _text(part: Any) -> str:
    return text_of([part] if isinstance(part, Mapping) else part)


def _tools(content: Mapping[str, Any]) -> list[ToolSchema]:
    """Return the tools that have a schema. Others are run by Anthropic's servers or known to its models only."""
    tools = content.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise EnvError(f"tools = {tools!r:.200}: give a list of objects")
    return [
        tool_of(tool, {**tool, "parameters": tool.get("input_schema")})
        for tool in tools
        if tool.get("type") in (None, "custom")
    ]


def _add(messages: list[ChatMessage], message: Any) -> None:
    """Add the messages that a message of the request stands for."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise EnvError(f"a message has no role: {message!r:.200}")
    role, blocks = message["role"], message.get("content")
    if not isinstance(blocks, list):
        blocks = [{"type": "text", "text": text_of(blocks)}]
    # Blocks of one message that follow each other are one text. Only the results of tools stand between.
    joins = False
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind in THOUGHTS:
            continue
        if kind == "tool_result":
            result: ChatMessage = {"role": "tool", "content": text_of(block.get("content"))}
            messages.append({**result, "tool_call_id": str(block.get("tool_use_id"))})
            joins = False
            continue
        part = message_of({"role": role, **_part(kind, block)})
        if joins or (role == "assistant" and messages and messages[-1]["role"] == role):
            join(messages[-1], part)
        else:
            messages.append(part)
        joins = True
    if role == "assistant" and (not messages or messages[-1]["role"] != role):
        # An answer of nothing but thoughts is a turn, too.
        messages.append({"role": role, "content": ""})


def _part(kind: Any, block: Mapping[str, Any]) -> dict[str, Any]:
    match kind:
        case "text":
            return {"content": text_of([block])}
        case "tool_use":
            named = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            return {"content": "", "tool_calls": [{"id": block.get("id"), "function": named}]}
        case _:
            raise EnvError(f"a message has a block of type {kind!r}, which the policy cannot read")


def message_answer(reply: Reply, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return the body of an answer. ``name`` is the answer's id; the API has no place for ``created``."""
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": list(_blocks(reply, request)),
        **_stop(reply),
        "usage": _usage(reply, reply.facts.answer_tokens),
    }


def _blocks(reply: Reply, request: ChatRequest) -> Iterator[dict[str, Any]]:
    message = reply.message
    calls = message.get("tool_calls", ())
    if (
        isinstance(request, MessagesRequest)
        and request.thinks
        and (thought := message.get("reasoning_content"))
    ):
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    if message["content"] or not calls:
        yield {"type": "text", "text": message["content"] or ""}
    for call in calls:
        function = call["function"]
        made = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        yield {"type": "tool_use", **made}


def _stop(reply: Reply) -> dict[str, Any]:
    """Return why the turn ended, and the stop sequence if it was one."""
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    at_stop = reply.finish_reason == "stop" and bool(reply.stopped_by)
    reason = "stop_sequence" if at_stop else reasons.get(reply.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by if at_stop else None}


def _usage(reply: Reply, output_tokens: int) -> dict[str, int]:
    # Clients add up all three numbers of the input. No token is reported as cached.
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": reply.facts.prompt_tokens, **cached, "output_tokens": output_tokens}


def message_events(reply: Reply, request: ChatRequest, name: str, created: int) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed answer, up to ``message_stop``."""
    whole = message_answer(reply, request, name, created)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply, 0)}
    yield _event("message_start", {"message": begun})
    yield _event("ping", {})
    for index, block in enumerate(whole["content"]):
        empty, deltas = _deltas(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    yield _event("message_delta", {"delta": _stop(reply), "usage": whole["usage"]})
    yield _event("message_stop", {})


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and what then fills it."""
    match block["type"]:
        case "tool_use":
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            return {**block, "input": {}}, [arguments]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": ""}, [thought, signed]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _event(kind: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n".encode()


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
TOO_LONG = "prompt is too long: "
"""Beginning of the text by which agents know that the conversation cannot go on: this API has no code for it."""


def message_error_event(status: int, body: dict[str, Any]) -> bytes:
    """Return the event that ends a stream in which no answer came. ``body`` is an error in the form of OpenAI's API.

    Example:
        >>> message_error_event(503, {"error": {"message": "gone", "code": None}})[:43]
        b'event: error\\ndata: {"type": "error", "error'
    """
    return _event("error", message_error(status, json.dumps(body)))


def message_error(status: int, text: str) -> dict[str, Any]:
    """Return the body of an error in this API's form.

    Args:
        status: status of the response.
        text: body of the error in the form of OpenAI's API, or any text.

    Example:
        >>> message_error(400, '{"error": {"message": "n = 2", "code": null}}')["error"]
        {'type': 'invalid_request_error', 'message': 'n = 2'}
    """
    try:
        error = json.loads(text)["error"]
        begin = TOO_LONG if error["code"] == "context_length_exceeded" else ""
        message = begin + error["message"]
    except (ValueError, LookupError, TypeError):
        message = text
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
