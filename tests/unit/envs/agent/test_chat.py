"""Requests of the chat route are read as harnesses send them, and answers have the form that their clients read."""

import json

import pytest

from envs.agent.chat import chunks, completion, make_reply, parse_request
from envs.agent.messages import parse_messages_request
from envs.agent.responses import parse_responses_request
from envs.base import TurnFacts
from envs.errors import EnvError

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FACTS = TurnFacts(30, 12, cut=False)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'


def request(**more):
    body = {"model": "m", "messages": [{"role": "user", "content": "12 + 7?"}], **more}
    return parse_request(json.dumps(body).encode())


def test_what_harnesses_send_is_read():
    found = request(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Add."}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "19", "unknown": 1},
        ],
        tools=[ADD, {"type": "web_search"}],
        stop=["Observation:", "Calling tools:"],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.2,
        max_tokens=32_000,
        tool_choice="required",
        prompt_cache_key="k",
    )  # fmt: skip
    assert found.messages == [
        {"role": "system", "content": "Add."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}],
        },
        {"role": "tool", "content": "19", "tool_call_id": "1"},
    ]
    assert found.tools == [ADD]
    assert (found.stop, found.stream, found.usage) == (("Observation:", "Calling tools:"), True, True)


BOUNDS = {
    "chat": (parse_request, {"messages": [{"role": "user"}], "max_tokens": 9}, 9),
    "chat, newer": (parse_request, {"messages": [{"role": "user"}], "max_completion_tokens": 8}, 8),
    "both": (parse_request, {"messages": [{"role": "user"}], "max_tokens": 7, "max_completion_tokens": 8}, 7),
    "responses": (parse_responses_request, {"input": "Hi", "max_output_tokens": 6}, 6),
    "messages": (
        parse_messages_request,
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        5,
    ),
    "none": (parse_responses_request, {"input": "Hi", "max_output_tokens": None}, None),
}


@pytest.mark.parametrize(("parse", "body", "most"), BOUNDS.values(), ids=BOUNDS)
def test_a_bound_on_the_answer_is_read(parse, body, most):
    assert parse(json.dumps(body).encode()).max_tokens == most


@pytest.mark.parametrize("bound", [0, -1, 2.5, "9", True])
@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_a_bound_that_is_none_is_refused(name, bound):
    parse, body, _ = BOUNDS[name]
    with pytest.raises(EnvError, match=r"tokens = .* give a whole number of at least 1"):
        parse(
            json.dumps(body | dict.fromkeys(set(body) & {"max_tokens", "max_output_tokens"}, bound)).encode()
        )


WRONG = {
    "not JSON": (b"{", "not JSON"),
    "no messages": (b"{}", 'no "messages"'),
    "a list": (b"[]", 'no "messages"'),
    "two answers": (b'{"messages": [{"role": "user"}], "n": 2}', "n = 2"),
    "a picture": (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "'image_url'"),
    "no role": (b'{"messages": [{"content": "Hi"}]}', "no role"),
    "a number as stop": (b'{"messages": [{"role": "user"}], "stop": 5}', "stop = 5"),
    "numbers as stops": (b'{"messages": [{"role": "user"}], "stop": [5]}', "stop = "),
    "tools that are none": (b'{"messages": [{"role": "user"}], "tools": [1]}', "list of objects"),
    "no name": (b'{"messages": [{"role": "user"}], "tools": [{"type": "function"}]}', "has no name"),
    "parameters": (
        b'{"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "a", '
        b'"parameters": 1}}]}',
        "are no object",
    ),
}


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_named(body, why):
    with pytest.raises(EnvError, match=why):
        parse_request(body)


def test_calls_and_thoughts_are_parts_of_a_message():
    reply = make_reply(f"<think>Let me add.</think>I add.\n{CALL}\n{CALL}", request(tools=[ADD]), 3, FACTS)
    assert reply.finish_reason == "tool_calls"
    assert reply.message["content"] == "I add."
    assert reply.message["reasoning_content"] == "Let me add."
    calls = reply.message["tool_calls"]
    assert [call["id"] for call in calls] == ["call_3_0", "call_3_1"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"a": 12, "b": 7}


def test_a_call_that_cannot_be_read_stays_text():
    broken = '<tool_call>\n{"name": "add", "argu'
    reply = make_reply(broken, request(tools=[ADD]), 0, TurnFacts(9, 9, cut=True))
    assert reply.message == {"role": "assistant", "content": broken}
    assert reply.finish_reason == "length"


def test_without_tools_markup_is_text():
    assert make_reply(CALL, request(), 0, FACTS).message == {"role": "assistant", "content": CALL}


def test_a_call_behind_a_stop_string_is_none():
    reply = make_reply(
        f"Observation: x {CALL}", request(tools=[ADD], stop="Observation:"), 0, TurnFacts(5, 9, cut=True)
    )
    assert reply.message == {"role": "assistant", "content": ""}
    assert reply.finish_reason == "stop"


def test_arguments_that_json_does_not_know_are_no_call():
    odd = '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'
    assert "tool_calls" not in make_reply(odd, request(tools=[ADD]), 0, FACTS).message


def test_half_a_surrogate_pair_reaches_the_agent_as_json():
    half = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
    asked = request(tools=[ADD], stream=True)
    assert all(chunks(make_reply(half, asked, 0, FACTS), asked, "id", 7))


def test_the_first_stop_string_ends_the_text():
    reply = make_reply(
        "Thought\nObservation: 19 </code>", request(stop=["</code>", "Observation:"]), 0, FACTS
    )
    assert reply.message["content"] == "Thought\n"
    assert reply.finish_reason == "stop"


def test_a_stream_adds_up_to_the_whole_answer():
    asked = request(tools=[ADD], stream=True, stream_options={"include_usage": True})
    reply = make_reply(f"I add.{CALL}", asked, 0, FACTS)
    *events, last = [event.removeprefix(b"data: ") for event in chunks(reply, asked, "id", 7)]
    assert last == b"[DONE]\n\n"
    *parts, usage = map(json.loads, events)
    assert usage["choices"] == []
    assert usage["usage"] == completion(reply, asked, "id", 7)["usage"]
    assert usage["usage"] == {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": "I add."}
    assert [call for delta in deltas for call in delta.get("tool_calls", ())] == [
        {"index": 0, **reply.message["tool_calls"][0]}
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "tool_calls"]


def test_what_a_request_says_about_sampling_can_always_be_recorded():
    """A number of more than 64 bits, or half of a character, would end the episode when it is sent."""
    import msgspec

    asked = {"seed": 10**30, "top_k": 10**400, "temperature": 0.5, "tool_choice": "a\ud83d"}
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **asked}).encode()
    settings = parse_request(body).settings
    assert settings["temperature"] == 0.5
    assert settings["seed"] == str(10**30)
    msgspec.msgpack.encode(settings)
    msgspec.json.encode(settings)


def test_stop_strings_are_bounded_because_each_is_looked_for_in_the_whole_answer():
    body = {"messages": [{"role": "user", "content": "a"}], "stop": [str(n) for n in range(65)]}
    with pytest.raises(EnvError, match="stop has 65 texts, at most 64"):
        parse_request(json.dumps(body).encode())
