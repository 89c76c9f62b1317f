"""Agents that an environment server runs hear what they hear at home: limits, declined requests, and the end."""

import asyncio
import json
import signal
import threading

import pytest

from envs.registry import make_suite
from tests.integration.envs.agent_play import decline, played
from tests.integration.envs.test_agent_requirements import AGENTS, echo, finished, seen
from tests.integration.envs.test_env_servers import Server

CHOSEN = """

async def chosen(row, url, key):
    return await globals()[SEEN.with_name("agent").read_text()](row, url, key)
"""

RUN_FILE = """
[model]
path = "none"

[env]
name = "agent"
params = {{ train = "{0}/rows.jsonl", run = "{0}/agents.py:chosen", heldout = 0.0 }}

[actor]
env_timeout_s = 30.0
"""


def served(folder):
    """Start a server for the agent that the file `agent` names."""
    (folder / "agents.py").write_text(AGENTS + CHOSEN)
    (folder / "rows.jsonl").write_text('{"n": 1}\n')
    (folder / "game.toml").write_text(RUN_FILE.format(folder))
    return Server(folder)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server for the tests that leave it alive, and its folder."""
    folder = tmp_path_factory.mktemp("agents")
    server = served(folder)
    yield server, folder
    server.kill()


def play(started, agent, answer=echo, **more):
    server, folder = started
    (folder / "agent").write_text(agent)
    return played(folder, "", answer, suite=make_suite("remote", {"url": server.url}), **more)


@pytest.mark.parametrize("agent", ["unrendered", "unrendered_first"])
def test_a_request_that_cannot_be_rendered_is_declined_and_the_episode_goes_on(shared, monkeypatch, agent):
    """The agent checks the status, the type of the error and its reason."""
    decline(monkeypatch)
    done = finished(play(shared, agent))
    assert done.rewards == [("reward", 1 if agent == "unrendered_first" else 3, 1.0)]


def test_an_agent_whose_context_is_full_may_go_on_with_fewer_messages(shared):
    bounds = {"max_context_tokens": 300, "max_trajectory_tokens": 2_000}
    done = finished(play(shared, "compacts", sampling=bounds))
    assert done.rewards == [("reward", done.trajectory.turns[-1].index, 1.0)]
    assert done.branches_trained_once() == 2
    assert max(len(branch.places) for branch in done.trajectory.branches()) <= 300
    ended = finished(play(shared, "gives_up", sampling=bounds))
    assert [(name, value) for name, _, value in ended.rewards] == [("reward", 0.5)]


def test_the_limit_of_an_episode_is_the_providers_error(shared):
    done = play(shared, "endless", bounds={"max_turns": 2})
    assert (done.last.status, done.last.stop_reason) == ("truncated", "max_turns")
    status, _, text = seen(shared[1])
    assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")


def given_up(started, stop=None):
    """Play until the agent waits for an answer. Then stop something, and cancel the episode. Return what it has got."""
    asked = threading.Event()

    async def behind(number):
        asked.set()
        await asyncio.sleep(60.0)

    async def end_after():
        assert await asyncio.to_thread(asked.wait, 60.0)
        if stop is not None:
            await asyncio.to_thread(stop)

    done = play(started, "endless", behind=behind, end_after=end_after)
    assert done.last is None or done.last.status == "unfinished"
    return seen(started[1])


def test_an_actor_that_drains_is_a_503_with_retry_after(shared):
    status, headers, text = given_up(shared)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert json.loads(text)["error"]["type"] == "server_error"


def test_a_server_that_drains_is_a_503_with_retry_after(tmp_path):
    server = served(tmp_path)
    try:
        status, headers, text = given_up((server, tmp_path), lambda: server.kill(signal.SIGTERM))
    finally:
        assert server.kill() == 0
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "its task runs again" in json.loads(text)["error"]["message"]
