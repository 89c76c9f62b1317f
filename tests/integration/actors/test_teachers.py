"""Teachers behind a real HTTP server: what they say becomes tokens of ours, and what they do not say costs little."""

import asyncio
import logging
from dataclasses import replace

import aiohttp
import msgspec
import numpy as np
import pytest

from actors.config import Teacher
from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.errors import TeacherFailed
from actors.generator_client import TurnRequest
from actors.play_requests import way_of_playing
from actors.teachers import Teachers
from envs.base import StepResult
from learner.intake.trajectories import assemble
from protocol.messages.episodes import LeaseTask, Task
from tests.integration.envs.test_judge import Server
from tests.unit.actors.test_episode import Env, Letters

ASKED = TurnRequest("t.0", 0, (1,), 64, messages=[{"role": "user", "content": "Q:"}])


def tokens(text):
    return [*map(ord, text), 0]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def run(server, play, clock=None, **settings):
    async def main():
        async with server:
            one = Teacher(**{"name": "big", "url": server.url, "model": "m", **settings})
            teachers = Teachers([one], tokens, clock or Clock())
            try:
                return await play(teachers)
            finally:
                await teachers.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


async def answer(teachers, request=ASKED):
    return [piece async for piece in teachers.named("big").turn(request)]


def test_an_answer_becomes_tokens_without_a_version_and_is_cut_where_the_policys_would_be():
    async def play(teachers):
        return *await answer(teachers), *await answer(teachers, replace(ASKED, max_tokens=2)), teachers.gauges

    server = Server("abc", "abc")
    whole, cut, gauges = run(server, play)
    assert (whole.token_ids.tolist(), whole.finish_reason) == (tokens("abc"), "stop")
    assert (cut.token_ids.tolist(), cut.finish_reason) == (tokens("ab")[:2], "length")
    assert set(whole.policy_version.tolist()) == {-1}
    assert not whole.logp_behaviour.any()
    assert gauges == {"teacher_answers_total": 2.0, "teacher_failures_total": 0.0}
    assert server.asked == ["Q:", "Q:"]


@pytest.mark.parametrize(
    ("script", "settings", "said"),
    [
        (["  "], {}, "has no text"),
        ([401], {}, "HTTP status 401: no; correct"),
        ([302], {}, "HTTP status 302"),
        (["wait"], {"timeout_s": 0.2}, r"no answer within timeout_s = 0.2 s$"),
        ([503, 503, 503, 503], {"timeout_s": 0.7}, "no answer within.*HTTP status 503"),
        ([None, None, None], {"timeout_s": 0.7}, "no answer within.*ServerDisconnectedError"),
    ],
)
def test_a_teacher_that_fails_rests_and_then_is_asked_again(script, settings, said):
    clock = Clock()

    async def play(teachers):
        with pytest.raises(TeacherFailed, match=said):
            await answer(teachers)
        asked = len(server.asked)
        with pytest.raises(TeacherFailed, match="is left alone for 30 s after: teacher big"):
            await answer(teachers)
        assert len(server.asked) == asked, "nobody was asked"
        clock.now, server.script = 31.0, ["x"]
        await answer(teachers)
        return teachers.gauges

    server = Server(*script)
    assert run(server, play, clock, **settings) == {
        "teacher_answers_total": 1.0,
        "teacher_failures_total": 2.0,
    }


def test_the_key_is_sent_and_never_said(monkeypatch, caplog):
    monkeypatch.setenv("BIG_KEY", "sk-secret")

    class Echo(Server):
        async def answer(self, request):
            key = request.headers["Authorization"]
            return aiohttp.web.Response(status=401, text=f"Incorrect key: {key}")

    async def play(teachers):
        with pytest.raises(TeacherFailed, match=r"Incorrect key: Bearer \*\*\*") as caught:
            await answer(teachers)
        assert "secret" not in str(caught.value)

    with caplog.at_level(logging.DEBUG, "actors"):
        run(Echo(), play, api_key_env="BIG_KEY")
    assert caplog.records
    assert "secret" not in caplog.text


def test_an_episode_is_played_by_a_teacher_and_says_so():
    task = Task(task_id="g.0", env="e", group_id="g", group_size=1, policy="big")
    env = Env(
        StepResult([{"role": "user", "content": "more"}]),
        StepResult(done=True, rewards={"r": 1.0}, info={"correct": True}),
    )

    async def play(teachers, task=task, env=env):
        class Suite:
            def episode(self):
                return env

        cuts, runner = [], EnvironmentRunner(calls=4)

        async def emit(more):
            cuts.extend(more)

        try:
            policy = teachers.named(task.policy)
            lease = LeaseTask(lease_id="l", attempt=0, task=task)
            await Episode(lease, Suite(), Letters(), policy, Bounds(), emit, runner, way_of_playing).run()
        finally:
            runner.close()
        return cuts

    server = Server("ab", "cd")
    cuts = run(server, play)
    t = assemble(cuts)
    assert server.asked == ["Q:", "Q:"]
    assert (t.origin, t.status, t.return_) == ("taught", "finished", 1.0)
    assert {cut.segment.policy for cut in cuts} == {"big"}
    assert set(t.policy_version.tolist()) == {-1}
    assert np.flatnonzero(t.action_mask).size == 6
    stranger = msgspec.structs.replace(task, policy="nobody")
    (failed,) = run(Server("ab"), lambda teachers: play(teachers, stranger, Env()))
    assert failed.segment.status == "failed"
    assert "teacher nobody is not in [[actor.teachers]]" in failed.segment.error
    assert failed.segment.failure is not None
    assert not failed.segment.failure.fault, "the policy is not at fault"
