"""Blocks of the route of messages are the messages of a conversation, and answers come back as blocks."""

import json

import pytest

from envs.agent.chat import make_reply
from envs.agent.message_tree import MessageTree
from envs.agent.messages import message_answer, message_error, message_events, parse_messages_request
from envs.base import TurnFacts
from envs.errors import EnvError

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 7,  "a": 12}}\n</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral"}}
FACTS = TurnFacts(5, 3, cut=False)


def request(messages, **more):
    body = {"model": "m", "max_tokens": 64, "messages": messages, **more}
    return parse_messages_request(json.dumps(body).encode())


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def results(blocks, **more):
    """Return the results of the calls in an answer, as a harness sends them."""
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call["id"], "content": [text("19")], "is_error": False, **more}
        for call in calls
    ]


def sent(events):
    """Return kind and content of server-sent events."""
    pairs = [event.decode().removesuffix("\n\n").split("\n") for event in events]
    assert all(kind.startswith("event: ") and data.startswith("data: ") for kind, data in pairs)
    found = [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in pairs]
    assert all(content["type"] == kind for kind, content in found)
    return found


SPELLINGS = {
    "as they came": lambda blocks: blocks,
    "without thoughts": lambda blocks: [block for block in blocks if block["type"] != "thinking"],
    "with marks of a cache": lambda blocks: [{**block, **CACHED} for block in blocks],
    "with other white space": lambda blocks: [
        {**block, "text": f"\n{block['text']} "} if block["type"] == "text" else block for block in blocks
    ],
    "in another order of keys": lambda blocks: [
        {**block, "input": dict(sorted(block["input"].items()))} if block["type"] == "tool_use" else block
        for block in blocks
    ],
    "with another id": lambda blocks: [
        {**block, "id": "toolu_01"} if block["type"] == "tool_use" else block for block in blocks
    ],
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_an_answer_that_comes_back_as_blocks_continues_the_conversation(spell):
    """What differs by request, such as marks of a cache and numbers for billing, does not count."""
    head = [text("x-anthropic-billing-header: cch=1;"), text("Add.")]
    first = request(
        [user(text("12 + 7?", **CACHED))],
        system=head,
        tools=[TOOL, SERVER_TOOL],
        metadata={"user_id": "1"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [tool["function"] for tool in first.tools] == [
        {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    ]
    reply = make_reply(f"<think>hm</think>I add.{CALL}{CALL}", first, 0, FACTS)
    tree = MessageTree()
    tree.place(first.messages, first.tools)
    tree.answered(0, reply.message)
    answer = message_answer(reply, first, "msg-1-0", 7)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["stop_reason"] == "tool_use"
    back = spell(answer["content"])
    second = request(
        [
            user(text("12 + 7?")),
            {"role": "assistant", "content": back},
            user(*results(back, **CACHED), text("Go on.")),
        ],
        system=[text("x-anthropic-billing-header: cch=2;"), text("Add.", **CACHED)],
        tools=[{**TOOL, "type": "custom", **CACHED}],
        metadata={"user_id": "2"},
    )
    place = tree.place(second.messages, second.tools)
    assert place.after == 0
    assert [(m["role"], m["content"]) for m in place.new] == [
        ("tool", "19"),
        ("tool", "19"),
        ("user", "Go on."),
    ]


def test_texts_are_messages_too_and_an_answer_may_come_in_two():
    asked = request(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "assistant", "content": [text(" there")]},
            user(text("a"), text("b")),
        ]
    )
    assert [(m["role"], m["content"]) for m in asked.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello there"),
        ("user", "ab"),
    ]


def test_an_answer_of_thoughts_alone_is_a_turn():
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    asked = request([user(text("Hi")), {"role": "assistant", "content": [thought]}, user(text("And?"))])
    assert [m["role"] for m in asked.messages] == ["user", "assistant", "user"]


WRONG = {
    "no messages": ({"messages": []}, 'no "messages"'),
    "an image": ({"messages": [user({"type": "image", "source": {}})]}, "'image'"),
    "an image of a tool": (
        {"messages": [user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]})]},
        "'image'",
    ),
    "a text block": ({"messages": [user("Hi")]}, "'str'"),
    "no role": ({"messages": ["Hi"]}, "no role"),
    "a beginning of the answer": (
        {"messages": [user(text("Hi")), {"role": "assistant", "content": "{"}]},
        "continues none",
    ),
    "stop": ({"messages": [user(text("Hi"))], "stop_sequences": "a"}, "list of texts"),
    "tools": ({"messages": [user(text("Hi"))], "tools": {"add": {}}}, "list of objects"),
    "a tool without a name": ({"messages": [user(text("Hi"))], "tools": [{"input_schema": {}}]}, "no name"),
}


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_read_is_named(body, why):
    with pytest.raises(EnvError, match=why):
        request(**body)


ENDS = {
    "stop": (FACTS, "4\nObservation: 5", "4\n", "stop_sequence", "Observation:"),
    "end": (FACTS, "4", "4", "end_turn", None),
    "cut": (TurnFacts(5, 3, cut=True), "4", "4", "max_tokens", None),
}


@pytest.mark.parametrize(("facts", "answer", "left", "reason", "stop"), ENDS.values(), ids=ENDS)
def test_why_a_turn_ended(facts, answer, left, reason, stop):
    asked = request([user(text("2 + 2?"))], stop_sequences=["Wait", "Observation:"])
    body = message_answer(make_reply(answer, asked, 0, facts), asked, "msg-1-0", 7)
    assert body["content"] == [{"type": "text", "text": left}]
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (5, 3)


def test_thoughts_are_for_those_who_ask_for_them():
    """A client that has not asked takes the first block for the text."""
    asked = request([user(text("2 + 2?"))], thinking={"type": "disabled"})
    reply = make_reply("<think>hm</think>4", asked, 0, FACTS)
    assert [block["type"] for block in message_answer(reply, asked, "m", 7)["content"]] == ["text"]


def test_a_stream_builds_the_same_answer():
    asked = request([user(text("12 + 7?"))], tools=[TOOL], stream=True, thinking={"type": "adaptive"})
    reply = make_reply(f"<think>hm</think>I add.{CALL}", asked, 0, FACTS)
    whole, events = (
        message_answer(reply, asked, "msg-1-0", 7),
        sent(message_events(reply, asked, "msg-1-0", 7)),
    )
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert kinds[2:-2] == [*signed, *block, *block]
    built, last = events[0][1]["message"], events[-2][1]
    assert built["stop_reason"] is None
    for kind, content in events:
        if kind == "content_block_start":
            assert content["index"] == len(built["content"])
            built["content"].append(content["content_block"])
        elif kind == "content_block_delta":
            into, delta = built["content"][content["index"]], content["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                into["input"] = json.loads(delta["partial_json"])
            else:
                into[name] += delta[name]
    assert {**built, **last["delta"], "usage": last["usage"]} == whole


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            400,
            '{"error": {"message": "over", "code": "context_length_exceeded"}}',
            None,
            "prompt is too long: over",
        ),
        (401, '{"error": {"message": "no key", "code": null}}', "authentication_error", "no key"),
        (410, '{"error": {"message": "ended", "code": null}}', None, "ended"),
        (
            413,
            "Maximum request body size exceeded",
            "request_too_large",
            "Maximum request body size exceeded",
        ),
        (503, "[]", "overloaded_error", "[]"),
        (500, "500: Internal", "api_error", "500: Internal"),
    ],
)
def test_errors_have_the_form_of_this_api(status, body, kind, message):
    kind = kind or "invalid_request_error"
    assert message_error(status, body) == {"type": "error", "error": {"type": kind, "message": message}}
