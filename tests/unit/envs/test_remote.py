"""What an environment server and its clients say to each other, and when an episode ends."""

import asyncio
import json
import re
from dataclasses import fields

import numpy as np
import pytest

from envs.base import StepResult, SuiteFacts
from envs.errors import EnvError, RemoteFailed, ServerLost, ServiceFailed
from envs.registry import beside
from envs.remote.sessions import RemoteAnswer, RemoteSession, RemoteSessions
from envs.remote.suite import RemoteSuite, checked_url
from envs.remote.wire import (
    FAILED,
    SERVICE,
    UNKNOWN,
    decoded,
    encoded,
    error_of,
    facts_body,
    facts_of,
    failure_body,
    result_body,
    result_of,
)

URL = "http://127.0.0.1:80"


def sent(content):
    return decoded(encoded(content))


def test_a_result_comes_over_with_numbers_of_numpy():
    given = StepResult(
        [{"role": "tool", "content": "7"}, {"role": "tool", "content": "8", "name": "add"}],
        {"exact": np.float32(0.5), "count": np.int64(2)},
        done=np.bool_(True),
        correct=np.bool_(False),
        info={"at": np.array([1, 2]), "of": {3}, "where": (1, None)},
        after=-1,
        tools=[{"type": "function"}],
        auxiliary=(0, 2),
        marks={"anchor": "kitchen", "calls": 2.0},
        earlier={0: {"tidy": 0.5}},
        hints=("look", "look left"),
        answer="7",
        target="8",
    )
    found = result_of(sent(result_body(given)))
    assert found == StepResult(
        given.observation,
        {"exact": 0.5, "count": 2},
        done=True,
        correct=False,
        info={"at": [1, 2], "of": "{3}", "where": [1, None]},
        after=-1,
        tools=[{"type": "function"}],
        auxiliary=[0, 2],
        marks={"anchor": "kitchen", "calls": 2.0},
        earlier={0: {"tidy": 0.5}},
        hints=("look", "look left"),
        answer="7",
        target="8",
    )
    body = sent(result_body(given))
    del body["hints"]
    assert result_of(body).hints == (), "a server of an earlier release gives none"


def test_every_field_of_a_result_and_of_facts_comes_over():
    assert set(result_body(StepResult())) == {f.name for f in fields(StepResult)} - {"observation"} | {
        "messages"
    }
    facts = SuiteFacts(
        heldout_tasks=3,
        reward_names=("a",),
        mark_names=("calls",),
        remarks=("b",),
        hints=True,
        own_prompts=True,
        train_tasks=4,
    )
    assert facts_of(sent(facts_body(facts))) == facts


def test_a_reward_that_is_no_number_stays_one_for_the_actor_to_refuse():
    rewards = result_of(sent(result_body(StepResult(rewards={"exact": float("nan")}, done=True)))).rewards
    assert rewards["exact"] != rewards["exact"]


@pytest.mark.parametrize("result", [None, {"done": True}, (1, 2)])
def test_what_is_no_result_is_named(result):
    with pytest.raises(EnvError, match="not a StepResult"):
        result_body(result)


def test_what_cannot_be_sent_is_named():
    circle = {}
    circle["in"] = circle
    for odd in (circle, {(1, 2): 3}):
        with pytest.raises(EnvError, match="cannot be sent"):
            encoded(odd)


@pytest.mark.parametrize("body", [{}, {"messages": [], "rewards": {}, "done": 1, "info": {}}])
def test_an_answer_that_is_none_is_named(body):
    with pytest.raises(EnvError, match="no valid"):
        result_of(body)


def test_facts_come_over():
    facts = SuiteFacts(3, ("exact",), (("heldout", 2, "a:3"),), ("mind",), {"sums": None})
    assert facts_of(sent(facts_body(facts))) == facts
    assert facts_of(sent(facts_body(SuiteFacts()))) == SuiteFacts()


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_of_the_environment_has_its_place_and_last_lines():
    body = sent(failure_body(raised(KeyError("answer")), blameless=False))
    error = error_of(FAILED, body, URL)
    assert isinstance(error, RemoteFailed)
    assert not isinstance(error, ServiceFailed)
    place = r"KeyError: 'answer' in .*test_remote\.py:\d+ in raised, on http://127\.0\.0\.1:80"
    assert re.fullmatch(rf"{place}; last lines: .* / raise error", str(error))


NOBODYS = {
    "a service": (
        SERVICE,
        failure_body(ServiceFailed("no judge"), blameless=True),
        ServiceFailed,
        "no judge",
    ),
    "an unknown episode": (UNKNOWN, {"error": {"message": "no such episode"}}, ServerLost, "no such episode"),
    "a proxy": (502, {}, ServerLost, "status 502"),
    "a token": (401, {}, ServiceFailed, "is it the token"),
    "an error of the server": (500, {"error": "odd"}, ServerLost, "status 500"),
}


@pytest.mark.parametrize(("status", "body", "kind", "why"), NOBODYS.values(), ids=NOBODYS)
def test_everything_else_is_nobodys_fault(status, body, kind, why):
    error = error_of(status, body, URL)
    assert type(error) is kind
    assert isinstance(error, ServiceFailed)
    assert why in str(error)


def test_what_is_asked_twice_is_done_once():
    async def main():
        session, done = RemoteSession("e", "c"), []

        def work(number):
            async def play():
                done.append(number)
                await asyncio.sleep(0)
                return RemoteAnswer(200, str(number).encode())

            return play

        assert [(await session.once(n, work(n))).body for n in (0, 0, 1)] == [b"0", b"0", b"1"]
        both = await asyncio.gather(session.once(2, work(2)), session.once(2, work(2)))
        assert {answer.body for answer in both} == {b"2"}
        assert done == [0, 1, 2]
        for wrong in (1, 4):
            with pytest.raises(EnvError, match=f"call {wrong} of episode e does not follow call 2"):
                await session.once(wrong, work(wrong))
        running = asyncio.create_task(session.once(3, work(3)))
        await asyncio.sleep(0)
        with pytest.raises(EnvError, match="call 4"):
            await session.once(4, work(4))
        assert (await running).body == b"3"

    asyncio.run(main())


def test_episodes_end_with_their_client_and_only_with_it():
    sessions = RemoteSessions(lease_s=10.0, most=3)
    for client, names in {"a": ("a1", "a2"), "b": ("b1",)}.items():
        sessions.heard(client, 0.0)
        assert all(sessions.add(RemoteSession(name, client)) for name in names)
    assert not sessions.add(RemoteSession("b2", "b"))
    sessions.heard("b", 8.0)
    assert sessions.expired(10.0) == []
    assert [session.name for session in sessions.expired(11.0)] == ["a1", "a2"]
    assert (len(sessions), sessions.clients) == (1, 1)
    assert sessions.get("b1") is sessions.pop("b1")
    assert sessions.all() == []


ADDRESSES = {
    "no scheme": ("127.0.0.1:80", "", "write http"),
    "a path": ("http://127.0.0.1/v1", "", "write http"),
    "no keys": ("https://10.0.0.1:80", "", "https needs params.keys"),
    "strangers": ("http://10.0.0.1:80", "", "not encrypted"),
    "keys in the open": ("http://127.0.0.1:80", "keys", "not encrypted"),
}


@pytest.mark.parametrize(("url", "keys", "why"), ADDRESSES.values(), ids=ADDRESSES)
def test_an_address_that_others_could_read_is_refused(url, keys, why):
    with pytest.raises(EnvError, match=why):
        checked_url(url, keys)


@pytest.mark.parametrize(
    ("params", "why"),
    [({"url": []}, "params.url"), ({"url": [5]}, "params.url"), ({"url": URL, "timeout_s": 0}, "timeout_s")],
)
def test_wrong_settings_are_named(params, why):
    with pytest.raises(EnvError, match=why):
        RemoteSuite(**params)


def test_the_keys_are_found_beside_the_run_file(tmp_path):
    (tmp_path / "envs-keys").mkdir()
    _, params = beside("remote", {"url": URL, "keys": "envs-keys"}, tmp_path)
    assert params == {"url": URL, "keys": str(tmp_path / "envs-keys")}
    assert json.dumps(beside("remote", {"url": URL}, tmp_path)[1]) == json.dumps({"url": URL})


class ScriptedServer:
    """Stands in for `EnvironmentClient`: answers from a list, and notes what is asked."""

    def __init__(self, *answers, url=URL):
        self.url, self.answers, self.asked = url, list(answers), []
        self.episodes, self.failed_at = 0, float("-inf")
        self.ended = asyncio.Event()

    async def ask(self, method, path, content, until, *, patient=True):
        self.asked.append((method, path))
        if method == "DELETE":
            self.ended.set()
        if method != "PUT" or "episodes" not in path:
            return {"lease_s": 0.03}
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            self.failed_at = float("inf") if isinstance(answer, ServerLost) else self.failed_at
            raise answer
        return answer

    async def close(self):
        return None


async def begun(servers, *names):
    """Begin episodes one after another. Return the errors, and the orphans, when the first server has ended one."""
    suite, errors = RemoteSuite([URL]), []
    suite._servers = servers
    for name in names:
        try:
            await suite.begin(name, {"index": 0})
        except EnvError as error:
            errors.append(error)
    orphans = {name for _, name, _ in suite._orphans}
    async with asyncio.timeout(10.0):
        await servers[0].ended.wait()
    await suite.close()
    return errors, orphans


def test_another_environment_is_refused_and_its_episode_ended():
    server = ScriptedServer({"suite": "a"}, {"suite": "a"}, {"suite": "b"})
    errors, orphans = asyncio.run(begun([server], "e1", "e2", "e3"))
    assert [str(error).startswith(f"{URL} serves another environment") for error in errors] == [True]
    assert orphans == {"e3"}
    assert ("DELETE", "/v1/episodes/e3") in server.asked
    assert server.episodes == 2


def test_an_episode_goes_on_to_the_next_server_and_leaves_nothing_behind():
    lost, there = ScriptedServer(ServerLost("gone")), ScriptedServer({"suite": "a"})
    errors, orphans = asyncio.run(begun([lost, there], "e1"))
    assert errors == []
    assert orphans == {"e1"}
    assert ("DELETE", "/v1/episodes/e1?given_up") in lost.asked
    assert "DELETE" not in [method for method, _ in there.asked]
    assert (lost.episodes, there.episodes) == (0, 1)


def test_an_environment_that_fails_at_its_beginning_is_not_tried_elsewhere():
    failing, other = ScriptedServer(RemoteFailed("KeyError")), ScriptedServer()
    errors, orphans = asyncio.run(begun([failing, other], "e1"))
    assert [type(error) for error in errors] == [RemoteFailed]
    assert orphans == {"e1"}
    assert ("DELETE", "/v1/episodes/e1") in failing.asked
    assert other.asked == []
