"""What the endpoint answers and streams, read by the types of OpenAI's and Anthropic's own packages.

The clients read answers without looking; the types' strict reading finds a field that is missing or has a wrong form.
"""

import json

import pytest
from pydantic import TypeAdapter

from envs.agent.chat import chunks, completion, error_body, error_event, make_reply, parse_request
from envs.agent.messages import (
    message_answer,
    message_error,
    message_error_event,
    message_events,
    parse_messages_request,
)
from envs.agent.responses import parse_responses_request, response, response_error_event, response_events
from envs.base import TurnFacts

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ANSWERS = {
    "text": ("It is 3.", False),
    "nothing": ("", False),
    "cut": ("It is", True),
    "thought": ("<think>Let me add.</think>It is 3.", False),
    "a call": (CALL, False),
    "text and calls": (f"I add.{CALL}{CALL}", False),
    "thought and a call": (f"<think>hm</think>{CALL}", False),
}


def replied(parse, content, answer):
    text, cut = ANSWERS[answer]
    request = parse(json.dumps({"model": "m", **content}).encode())
    return make_reply(text, request, 2, TurnFacts(9, 5, cut=cut)), request


def strict(kind, value):
    """Read a value by a type of a client as the API sends it: as JSON, with nothing made of anything else."""
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def events(parts):
    """Return name and content of server-sent events."""
    for part in parts:
        lines = dict(line.split(": ", 1) for line in part.decode().strip().splitlines())
        if lines["data"] != "[DONE]":
            yield lines.get("event", ""), json.loads(lines["data"])


@pytest.mark.parametrize("answer", ANSWERS)
def test_chat_completions(answer):
    chat = pytest.importorskip("openai.types.chat")
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    content = {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": tools}
    content |= {"stream_options": {"include_usage": True}}
    reply, request = replied(parse_request, content, answer)
    whole = strict(chat.ChatCompletion, completion(reply, request, "id", 7))
    parts = [strict(chat.ChatCompletionChunk, part) for _, part in events(chunks(reply, request, "id", 7))]
    streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert streamed == (whole.choices[0].message.content or "")
    calls = [call for p in parts if p.choices for call in p.choices[0].delta.tool_calls or ()]
    assert [c.function.arguments for c in calls] == [
        c.function.arguments for c in whole.choices[0].message.tool_calls or ()
    ]
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == whole.choices[0].finish_reason
    assert parts[-1].usage == whole.usage


@pytest.mark.parametrize("answer", ANSWERS)
def test_responses(answer):
    responses = pytest.importorskip("openai.types.responses")
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    reply, request = replied(parse_responses_request, {"input": "1 + 2?", "tools": tools}, answer)
    # `created_at` is a float in the client's type, and whole seconds in the API's answers.
    whole = strict(responses.Response, response(reply, request, "id", 7))
    seen = [
        (name, strict(responses.ResponseStreamEvent, e))
        for name, e in events(response_events(reply, request, "id", 7))
    ]
    assert all(name == event.type for name, event in seen)
    assert [event.sequence_number for _, event in seen] == list(range(len(seen)))
    assert seen[-1][1].response == whole
    text = "".join(event.delta for name, event in seen if name == "response.output_text.delta")
    assert text == whole.output_text
    done = [event.item for name, event in seen if name == "response.output_item.done"]
    assert done == whole.output


@pytest.mark.parametrize("answer", ANSWERS)
def test_messages(answer):
    types = pytest.importorskip("anthropic.types")
    tools = [{"name": "add", "input_schema": SCHEMA}]
    content = {"max_tokens": 9, "messages": [{"role": "user", "content": "1 + 2?"}], "tools": tools}
    reply, request = replied(parse_messages_request, content, answer)
    whole = strict(types.Message, message_answer(reply, request, "id", 7))
    seen = list(events(message_events(reply, request, "id", 7)))
    told = [strict(types.RawMessageStreamEvent, event) for name, event in seen if name != "ping"]
    assert all(name == event["type"] for name, event in seen)
    starts = [event for event in told if event.type == "content_block_start"]
    assert [event.content_block.type for event in starts] == [block.type for block in whole.content]
    text = "".join(
        e.delta.text for e in told if e.type == "content_block_delta" and e.delta.type == "text_delta"
    )
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    (delta,) = [event for event in told if event.type == "message_delta"]
    assert delta.delta.stop_reason == whole.stop_reason
    assert delta.usage.output_tokens == whole.usage.output_tokens


def test_errors():
    shared = pytest.importorskip("openai.types.shared")
    responses = pytest.importorskip("openai.types.responses")
    anthropic = pytest.importorskip("anthropic.types")
    body = error_body("no room", "overloaded", "server_error")
    strict(shared.ErrorObject, body["error"])
    ((_, event),) = events([error_event(503, body)])
    strict(shared.ErrorObject, event["error"])
    ((_, event),) = events([response_error_event(503, body)])
    strict(responses.ResponseErrorEvent, event)
    strict(anthropic.ErrorResponse, {"request_id": None, **message_error(503, "no room")})
    ((name, event),) = events([message_error_event(503, body)])
    assert name == "error"
    strict(anthropic.ErrorResponse, {"request_id": None, **event})
