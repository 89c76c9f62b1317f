"""Test what `benchmarks.agent_cost` prints for known figures, and the process that its agents run in."""

import asyncio
import sys

import pytest

from benchmarks.agent_cost import client, program, tokens
from benchmarks.agent_process import ENDED, AgentProcess
from benchmarks.generation.system import Outcome

ECHO = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["text"] == "end":
        break
    result = {"error": "no"} if job["text"] == "fail" else {"text": job["text"] * 2}
    print(json.dumps({**result, "number": job["number"]}), flush=True)
"""


def test_ratios_are_of_rounds_that_ran_one_after_the_other():
    table = program.table({"bare": [1.0, 2.0, 1.0], "endpoint": [3.0, 2.0, 2.0]})
    assert "| endpoint with its episodes | 2.00 [2.00, 3.00] | 2.0 [1.0, 3.0] |" in table


def test_tokens_per_second_are_compared_round_by_round():
    rounds = {
        tokens.OURS: [Outcome(100, 1.0, {"actor": 0.001}), Outcome(300, 2.0, {"actor": 0.003})],
        tokens.PEER: [Outcome(200, 1.0, {"server": 0.01}), Outcome(100, 1.0, {"server": 0.01})],
    }
    table = tokens.table(tokens.summary(rounds)).splitlines()
    assert table[2:] == [
        "| ours | 125 [100, 150] |  | actor 10 |",
        "| vllm serve | 150 [100, 200] | 1.00 [0.50, 1.50] | server 67 |",
    ]


def test_the_agent_answers_every_call_and_otherwise_goes_on():
    calls = [{"id": "call_0"}, {"id": "call_1"}]
    said = client.following({"role": "assistant", "content": None, "tool_calls": calls})
    assert [message["tool_call_id"] for message in said] == ["call_0", "call_1"]
    assert client.following({"role": "assistant", "content": "", "tool_calls": []})[0]["role"] == "user"


def test_results_and_errors_reach_who_asked():
    agents = AgentProcess([sys.executable, "-c", ECHO])

    async def ask() -> None:
        found = await asyncio.gather(*(agents.ask({"text": text}) for text in "abc"))
        assert [result["text"] for result in found] == ["aa", "bb", "cc"]
        with pytest.raises(RuntimeError, match="no"):
            await agents.ask({"text": "fail"})

    try:
        asyncio.run(asyncio.wait_for(ask(), 30.0))
    finally:
        agents.close()


def test_whoever_waits_learns_that_the_process_has_ended():
    agents = AgentProcess([sys.executable, "-c", ECHO])

    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=ENDED):
                await agents.ask({"text": "end"})

    try:
        asyncio.run(asyncio.wait_for(ask(), 30.0))
    finally:
        agents.close()
