"""A server with OpenEnv's protocol is played over a WebSocket, and its errors are told apart."""

import asyncio
import json

import pytest
from aiohttp import WSMsgType, web

from envs.errors import EnvError, ServerLost
from envs.openenv import OpenEnvSession
from envs.registry import make_suite


class CountingServer:
    """Counts up to 2. Its messages have the form of openenv-core 0.3.0."""

    def __init__(self):
        self.resets, self.closed, self.full = [], [], 0

    async def handle(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.full:
            self.full -= 1
            await self._error(socket, "CAPACITY_REACHED", active_sessions=1, max_sessions=1)
            await socket.close()
            return socket
        count = 0
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            asked = json.loads(message.data)
            if asked["type"] == "close":
                self.closed.append(count)
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
            elif asked["data"] == {"metadata": {}, "message": "up"}:
                count += 1
            elif asked["data"]["message"] == "fail":
                await self._error(socket, "EXECUTION_ERROR")
                continue
            elif asked["data"]["message"] == "die":
                break
            elif asked["data"]["message"] == "hang":
                continue
            else:
                await self._error(socket, "VALIDATION_ERROR", errors=[{"loc": ["message"]}])
                continue
            seen = {"observation": {"count": count, "seen": ["a"]}, "reward": count / 2 or None}
            await socket.send_json({"type": "observation", "data": {**seen, "done": count == 2}})
        await socket.close()
        return socket

    async def _error(self, socket, code, **more):
        await socket.send_json({"type": "error", "data": {"message": "No.", "code": code, **more}})


def play(use, **params):
    """Start a server, make the suite, and return what ``use`` returns."""

    async def main():
        server, app = CountingServer(), web.Application()
        app.router.add_get("/ws", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = {"action": "message", "fields": {"metadata": {}}, "solved_at": 1.5, "timeout_s": 5.0}
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        suite = make_suite("openenv", {"url": url, **settings, **params})
        env = suite.episode()
        try:
            return await use(server, env)
        finally:
            await env.close()
            await suite.close()
            await runner.cleanup()

    return asyncio.run(main())


def test_an_episode_is_a_session():
    async def use(server, env):
        first = await env.reset({"index": 3, "split": "heldout"})
        results = [await env.step("<think>hm</think> up "), await env.step("down"), await env.step("up")]
        await env.close()
        return server, first, results

    server, first, [one, wrong, last] = play(use, instruction="Count.", reset={"level": 2})
    assert server.resets == [{"seed": 7, "level": 2}]
    assert first == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": 'count: 0, seen: ["a"]'},
    ]
    assert (one.messages(), one.rewards) == (
        [{"role": "tool", "content": 'count: 1, seen: ["a"]'}],
        {"reward": 0.5},
    )
    assert "No. [{'loc': ['message']}]" in wrong.messages()[0]["content"]
    assert (last.done, last.correct, last.rewards) == (True, True, {"reward": 1.0})
    assert last.info == {"return": 1.5, "refused_actions": 1}
    assert server.closed == [2], "the session was ended, once"


def test_a_full_server_is_asked_again():
    async def use(server, env):
        server.full = 1
        return await env.reset({"index": 0, "split": "train"})

    assert play(use, field="count")[0]["content"] == "0"


FAILURES = {
    "the environment failed": ("fail", EnvError, "EXECUTION_ERROR: No."),
    "the server has gone": ("die", ServerLost, "has closed the session"),
    "the server is silent": ("hang", ServerLost, "no answer to step in 1 s"),
}


@pytest.mark.parametrize(("action", "kind", "why"), FAILURES.values(), ids=FAILURES)
def test_failures_are_told_apart(action, kind, why):
    async def use(server, env):
        await env.reset({"index": 0, "split": "train"})
        with pytest.raises(EnvError, match=why) as caught:
            await env.step(action)
        return type(caught.value)

    assert play(use, timeout_s=1.0) is kind


def test_no_server_is_nobodys_fault():
    async def main():
        session = OpenEnvSession("http://127.0.0.1:9", 0.3)
        with pytest.raises(ServerLost, match="does not answer"):
            await session.reset({})
        await session.close()

    asyncio.run(main())


WRONG = {
    "no address": ({"url": "localhost:8000", "action": "message"}, "write the address of a server"),
    "no action": ({"url": "http://h:1"}, "params.action"),
    "two": ({"url": "http://h:1", "action": "message", "parse": "p.py:parse"}, "params.action"),
    "role": ({"url": "http://h:1", "action": "message", "role": "judge"}, "params.role"),
    "template": ({"url": "http://h:1", "action": "m", "prompt": "{board}"}, "params.prompt"),
}


@pytest.mark.parametrize(("params", "why"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(params, why):
    with pytest.raises(EnvError, match=why):
        make_suite("openenv", params)
