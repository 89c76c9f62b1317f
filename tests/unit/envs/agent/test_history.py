"""A request continues its conversation however a harness spells the messages; everything else is named."""

import json

import pytest

from envs.agent.history import History, canonical
from envs.errors import EnvError

THOUGHT = {"reasoning_content": "hm"}
CALLS = [
    {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"b":7,  "a": 12}'}},
    {"id": "call_0_1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
]
ANSWER = {"role": "assistant", "content": None, "tool_calls": CALLS, **THOUGHT}
ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12 + 7?"}]
RESULTS = [
    {"role": "tool", "tool_call_id": "call_0_0", "content": "19"},
    {"role": "tool", "tool_call_id": "call_0_1", "content": "0"},
]


def spelled(arguments, content, **more):
    calls = [{**call, "function": {**call["function"]}} for call in CALLS]
    calls[0]["function"]["arguments"] = arguments
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


RETURNED = {
    "hand loop": ANSWER,
    "openai-agents drops the thought": {k: v for k, v in ANSWER.items() if k not in THOUGHT},
    "pydantic-ai": spelled('{"b":7,"a":12}', "", reasoning=""),
    "langgraph": spelled('{"b": 7, "a": 12}', ""),
    "ag2 sorts": spelled('{"a": 12, "b": 7}', []),
    "inspect-ai": spelled('{"a": 12, "b": 7}', "\n"),
    "parts": spelled('{"a": 12, "b": 7}', [{"type": "text", "text": " "}]),
    "values": spelled({"a": 12, "b": 7}, None, refusal=None),
    "numbers of another language": spelled('{"b":7.0,"a":1.2e1}', None),
}


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_a_conversation_goes_on_however_the_answer_is_spelled(returned):
    history = History(ASKED, tools=[])
    history.answered(ANSWER)
    assert history.new_messages([*ASKED, returned, *RESULTS], tools=[]) == RESULTS
    history.answered({"role": "assistant", "content": "19"})
    more = {"role": "user", "content": "And 1 + 1?"}
    again = [*ASKED, returned, *RESULTS, {"role": "assistant", "content": "19 "}, more]
    assert history.new_messages(again, tools=[]) == [more]


SMOLAGENTS = {"role": "assistant", "content": "Calling tools:\n[{'id': 'call_0_0'}]"}
BROKEN = {
    "calls became text": ([*ASKED, SMOLAGENTS, *RESULTS], "message 3 was 'assistant:  .add "),
    "another argument": ([*ASKED, spelled('{"a": 13, "b": 7}', None), *RESULTS], "message 3"),
    "a window": ([ASKED[0], ANSWER, *RESULTS], "message 2 was 'user: 12 . 7.'"),
    "a title": ([{"role": "system", "content": "Write a title."}], "message 1 was 'system: Add.'"),
    "the same request": (ASKED, "nothing behind the last of 3"),
    "nothing new": ([*ASKED, ANSWER], "nothing behind the last of 3"),
}


@pytest.mark.parametrize(("sent", "why"), BROKEN.values(), ids=BROKEN)
def test_a_request_that_does_not_continue_is_named(sent, why):
    history = History(ASKED, tools=[])
    history.answered(ANSWER)
    with pytest.raises(EnvError, match=why):
        history.new_messages(sent, tools=[])


def test_other_tools_are_another_conversation():
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    history = History(ASKED, tools=[tool])
    history.answered(ANSWER)
    same = json.loads(json.dumps(tool))
    with pytest.raises(EnvError, match="other tools"):
        history.new_messages([*ASKED, ANSWER, *RESULTS], tools=[])
    assert history.new_messages([*ASKED, ANSWER, *RESULTS], tools=[same]) == RESULTS


def test_roles_and_texts_count():
    assert canonical({"role": "user", "content": "a"}) != canonical({"role": "tool", "content": "a"})
    assert canonical({"role": "user", "content": "a b"}) != canonical({"role": "user", "content": "a  b"})
