"""Items of the route of responses are the messages of a conversation, and answers come back as items."""

import json

import pytest

from envs.agent.chat import make_reply
from envs.agent.message_tree import MessageTree
from envs.agent.responses import parse_responses_request, response, response_events
from envs.base import TurnFacts
from envs.errors import EnvError

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object"},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def request(items, **more):
    return parse_responses_request(json.dumps({"model": "m", "input": items, **more}).encode())


def test_an_answer_that_comes_back_as_items_continues_the_conversation():
    first = request(
        [{"role": "user", "content": "1?"}], tools=[TOOL, {"type": "web_search"}, {"type": "namespace"}]
    )
    assert [tool["function"]["name"] for tool in first.tools] == ["add"]
    reply = make_reply(f"<think>hm</think>I add.{CALL}{CALL}", first, 0, TurnFacts(5, 3, cut=False))
    tree = MessageTree()
    tree.place(first.messages, first.tools)
    tree.answered(0, reply.message)
    items = response(reply, first, "resp-1-0", 7)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in items
        if item["type"] == "function_call"
    ]
    second = request([{"role": "user", "content": "1?"}, *items, *results], tools=[TOOL])
    place = tree.place(second.messages, second.tools)
    assert (place.after, [m["tool_call_id"] for m in place.new]) == (0, ["call_0_0", "call_0_1"])


def test_items_and_tools_as_codex_sends_them_are_read():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "12 + 7?"}]},
        {
            "type": "reasoning",
            "id": "rs_resp-1-0",
            "summary": [{"type": "summary_text", "text": "Let me see."}],
            "content": None,
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_resp-1-0_0",
            "name": "exec_command",
            "arguments": '{"cmd": "echo $((12 + 7))"}',
            "call_id": "call_0_0",
        },
        {"type": "function_call_output", "id": "fco_01", "call_id": "call_0_0", "output": "Output:\n19\n"},
    ]
    shell = {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}}
    agents = {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [shell]}
    search = {"type": "web_search", "external_web_access": True}
    asked = request(
        items, tools=[shell, agents, search], instructions="You code.", stream=True, store=False,
        tool_choice="auto", parallel_tool_calls=True, reasoning={"summary": "auto"}, include=[],
        prompt_cache_key="1", client_metadata={"thread": "1"},
    )  # fmt: skip
    assert [message["role"] for message in asked.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert asked.messages[3]["tool_calls"][0]["function"]["arguments"] == {"cmd": "echo $((12 + 7))"}
    assert ([tool["function"]["name"] for tool in asked.tools], asked.stream) == (["exec_command"], True)


WRONG = {
    "no input": ([], 'no "input"'),
    "an image": ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "'input_image'"),
    "a reference": ([{"type": "item_reference", "id": "1"}], "'item_reference'"),
    "a text item": (["Hi"], "'str'"),
}


@pytest.mark.parametrize(("items", "why"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_read_is_named(items, why):
    with pytest.raises(EnvError, match=why):
        request(items)


def test_nothing_is_stored():
    with pytest.raises(EnvError, match="nothing is stored"):
        request("Hi", previous_response_id="resp-1-0")


def test_a_turn_that_was_cut_is_incomplete():
    asked = request("Hi")
    reply = make_reply("Once upon", asked, 0, TurnFacts(5, 2, cut=True))
    whole = response(reply, asked, "resp-1-0", 7)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    *_, last = response_events(reply, asked, "resp-1-0", 7)
    kind, data = last.decode().strip().split("\n")
    assert kind == "event: response.incomplete"
    assert json.loads(data.removeprefix("data: "))["response"] == whole
