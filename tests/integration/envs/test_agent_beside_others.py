"""Agents beside other environments hear what they hear alone: declined requests, limits, and the end."""

import asyncio
import json
import threading

import pytest

from envs.registry import make_suite
from tests.integration.envs.agent_play import decline, played
from tests.integration.envs.test_agent_requirements import AGENTS, echo, finished, seen


@pytest.fixture
def play(tmp_path):
    """Play an agent of `AGENTS`, whose table is the first of two."""
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')

    def run(agent, **more):
        params = {"run": f"{tmp_path}/agents.py:{agent}", "train": f"{tmp_path}/rows.jsonl", "heldout": 0.0}
        tables = [{"name": "agent", "params": params}, {"name": "calculator"}]
        suite = make_suite("several", {"environments": tables})
        return played(tmp_path, "", echo, suite=suite, **more)

    return run


def test_a_request_that_cannot_be_rendered_is_declined_and_the_episode_goes_on(play, monkeypatch):
    decline(monkeypatch)
    assert finished(play("unrendered")).rewards == [("agent/reward", 3, 1.0)]


def test_an_agent_whose_context_is_full_may_go_on_with_fewer_messages(play):
    done = finished(play("compacts", sampling={"max_context_tokens": 300, "max_trajectory_tokens": 2_000}))
    assert [(name, value) for name, _, value in done.rewards] == [("agent/reward", 1.0)]
    assert done.branches_trained_once() == 2


def test_an_actor_that_drains_is_a_503_with_retry_after(play, tmp_path):
    asked = threading.Event()

    async def behind(number):
        asked.set()
        await asyncio.sleep(60.0)

    async def end_after():
        assert await asyncio.to_thread(asked.wait, 60.0)

    play("endless", behind=behind, end_after=end_after)
    status, headers, text = seen(tmp_path)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert json.loads(text)["error"]["type"] == "server_error"
