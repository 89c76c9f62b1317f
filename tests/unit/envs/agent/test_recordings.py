"""Requests of real harnesses find their places. `python -m tests.campaigns.harnesses --records FOLDER` keeps them."""

import json
from pathlib import Path

import pytest

from envs.agent.chat import ChatRequest, make_reply
from envs.agent.message_tree import MessageTree
from envs.base import TurnFacts

RECORDS = {
    path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("recordings/*.json")
}
CONVERSATIONS = {
    "codex": 1,
    "inspect-ai": 1,
    "inspect-ai-responses": 2,
    "mini-swe-agent": 1,
    "opencode": 2,
    "langgraph": 1,
    "openai-agents-sub-agents": 4,
    "smolagents-tool-calls": 3,
    "smolagents-code": 4,
    "strands-window": 3,
    "verifiers": 1,
}


def request(record):
    tools = [{"type": "function", "function": {"name": name}} for name in record["tools"]]
    return ChatRequest(record["messages"], tools, "m", tuple(record["stop"]), stream=False, usage=False)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_each_request_follows_the_answer_that_it_followed(name):
    tree, begun = MessageTree(), 0
    for number, record in enumerate(RECORDS[name]):
        asked = request(record)
        place = tree.place(asked.messages, asked.tools)
        assert place.after == record["after"]
        assert place.after < 0 or place.new == asked.messages[-len(place.new) :]
        begun += place.after < 0
        reply = make_reply(record["answer"], asked, number, TurnFacts(9, 9, cut=False))
        tree.answered(place.number, reply.message)
    assert begun == CONVERSATIONS[name]


def test_every_recording_is_used():
    assert set(RECORDS) == set(CONVERSATIONS)
    assert max(record["after"] for record in RECORDS["openai-agents-sub-agents"]) > 2, "they take turns"
