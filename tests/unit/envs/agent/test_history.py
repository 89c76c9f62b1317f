"""Messages are recognised however a harness spells them."""

import pytest

from envs.agent.message_tree import canonical

THOUGHT = {"reasoning_content": "hm"}
CALLS = [
    {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"b":7,  "a": 12}'}},
    {"id": "call_0_1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
]
ANSWER = {"role": "assistant", "content": None, "tool_calls": CALLS, **THOUGHT}


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
def test_an_answer_is_the_same_however_it_is_spelled(returned):
    assert canonical(returned) == canonical(ANSWER)


CHANGED = {
    "calls became text": {"role": "assistant", "content": "Calling tools:\n[{'id': 'call_0_0'}]"},
    "another argument": spelled('{"a": 13, "b": 7}', None),
    "a text": spelled('{"a": 12, "b": 7}', "Let me see."),
    "one call": {**ANSWER, "tool_calls": CALLS[:1]},
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_what_says_something_else_is_another_message(changed):
    assert canonical(changed) != canonical(ANSWER)


def test_roles_and_texts_count():
    assert canonical({"role": "user", "content": "a"}) != canonical({"role": "tool", "content": "a"})
    assert canonical({"role": "user", "content": "a b"}) != canonical({"role": "user", "content": "a  b"})
