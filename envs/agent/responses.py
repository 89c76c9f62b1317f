"""Requests and answers of the route `/v1/responses`, in the form of OpenAI's API. Pure.

A conversation is a list of items here: messages, function calls and their outputs. Neighbouring items of the assistant
are one message of the conversation. Thoughts come back as items of their own, and are left out.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from envs.agent.chat import (
    ChatRequest,
    Reply,
    demands_call,
    fields_ignored,
    fields_of,
    functions_in,
    limit_in,
    settings_in,
    tool_of,
)
from envs.base import ChatMessage
from envs.errors import EnvError
from envs.messages import join, message_of, text_of


def parse_responses_request(body: bytes) -> ChatRequest:
    """Return the request in a body. Fields that are not known are ignored, as sampling parameters are.

    Raises:
        EnvError: the body is no such request, or asks for what cannot be had.

    Example:
        >>> parse_responses_request(b'{"instructions": "Be brief.", "input": "2 + 2?"}').messages
        [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """
    content = fields_of(body)
    items = content.get("input")
    if not isinstance(items, str | list) or not items:
        raise EnvError('the body has no "input"')
    if content.get("previous_response_id") is not None:
        raise EnvError("previous_response_id: nothing is stored; send the whole conversation")
    messages: list[ChatMessage] = []
    if instructions := text_of(content.get("instructions")):
        messages.append({"role": "system", "content": instructions})
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        _add(messages, item)
    return ChatRequest(
        messages=messages,
        tools=[tool_of(tool, tool) for tool in functions_in(content)],
        model=str(content.get("model", "")),
        stop=(),
        stream=bool(content.get("stream")),
        usage=True,
        max_tokens=limit_in(content),
        settings=settings_in(content),
        demands_call=demands_call(content),
        fields_ignored=fields_ignored(content, "input", "instructions", "previous_response_id"),
    )


def _add(messages: list[ChatMessage], item: Any) -> None:
    """Add an item to the conversation."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else type(item).__name__
    match kind:
        case "message":
            _append(messages, message_of(item))
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "function": {key: item.get(key) for key in ("name", "arguments")},
            }
            _append(messages, message_of({"role": "assistant", "content": "", "tool_calls": [call]}))
        case "function_call_output":
            output = text_of(item.get("output"))
            messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id"))})
        case "reasoning":
            pass
        case _:
            raise EnvError(f"the input has an item of type {kind!r}, which the policy cannot read")


def _append(messages: list[ChatMessage], message: ChatMessage) -> None:
    """Append a message, or join it to the last one if both are the assistant's."""
    last = messages[-1] if messages else None
    if last is None or not last["role"] == message["role"] == "assistant":
        messages.append(message)
        return
    join(last, message)


def response(reply: Reply, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return the body of an answer. ``name`` is the answer's id, and ``created`` is in seconds since 1970."""
    cut = reply.finish_reason == "length"
    facts = reply.facts
    usage = {
        "input_tokens": facts.prompt_tokens,
        "output_tokens": facts.answer_tokens,
        "total_tokens": facts.prompt_tokens + facts.answer_tokens,
        # Clients read these without asking whether they are there. No token is reported as cached.
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        **_head(request, name, created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(reply, name)),
        "usage": usage,
    }


def _head(request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in request.tools],
    }


def _items(reply: Reply, name: str) -> Iterator[dict[str, Any]]:
    message = reply.message
    if thought := message.get("reasoning_content"):
        yield {
            "id": f"rs_{name}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": thought}],
        }
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": message["content"] or "", "annotations": []}
        role = {"role": "assistant", "status": "completed"}
        yield {"id": f"msg_{name}", "type": "message", **role, "content": [part]}
    for number, call in enumerate(calls):
        head = {"id": f"fc_{name}_{number}", "type": "function_call", "status": "completed"}
        yield {**head, "call_id": call["id"], **call["function"]}


def response_events(reply: Reply, request: ChatRequest, name: str, created: int) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed answer, up to ``response.completed``."""
    whole, begun = response(reply, request, name, created), _head(request, name, created)
    last = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        *(event for index, item in enumerate(whole["output"]) for event in _item_events(index, item)),
        (last, {"response": whole}),
    ]
    for number, (kind, content) in enumerate(events):
        data = json.dumps({"type": kind, "sequence_number": number, **content})
        yield f"event: {kind}\ndata: {data}\n\n".encode()


def response_error_event(status: int, body: dict[str, Any]) -> bytes:
    """Return the event that ends a stream in which no answer came. ``body`` is that of the error.

    Example:
        >>> response_error_event(503, {"error": {"message": "gone", "code": None}})[:28]
        b'event: error\\ndata: {"message'
    """
    error = body["error"]
    content = {**error, "type": "error", "sequence_number": 0, "error": error}
    return f"event: error\ndata: {json.dumps(content)}\n\n".encode()


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    match item["type"]:
        case "message":
            part, text_at = item["content"][0], {**at, "content_index": 0}
            yield _added(index, {**item, "status": "in_progress", "content": []})
            yield "response.content_part.added", {**text_at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**text_at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**text_at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**text_at, "part": part}
        case "function_call":
            yield _added(index, {**item, "status": "in_progress", "arguments": ""})
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**at, **named}
        case _:
            yield _added(index, item)
    yield "response.output_item.done", {"output_index": index, "item": item}


def _added(index: int, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "response.output_item.added", {"output_index": index, "item": item}
