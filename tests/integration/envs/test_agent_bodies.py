"""What a request of an agent may cost: its size, its number of values and its compression are bounded at the door."""

import asyncio
import gzip
import io
import json
import socket
from pathlib import Path

import aiohttp
import pytest

from envs.agent import endpoint
from envs.agent.endpoint import Endpoint

MESSAGES = b'"messages": [{"role": "user", "content": "a"}]'
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
BODIES = {
    "compressed": (gzip.compress(b"{" + MESSAGES + b" " * 2_000_000 + b"}"), {"Content-Encoding": "gzip"}, 415),
    "too many bytes": (b" " * (endpoint.BODY_BYTES + 1), {}, 413),
    "too many values": (b"[" + b"[]," * 2_000_000 + b"[]]", {}, 400),
    "not JSON": (b"{" * 300_000, {}, 400),
    "NaN": (b"{" + MESSAGES + b', "temperature": NaN}', {}, 400),
    "1e999": (b"{" + MESSAGES + b', "temperature": 1e999}', {}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_a_body_that_would_cost_too_much_is_refused_at_the_door(name, route):
    body, headers, status = BODIES[name]

    async def main():
        served = Endpoint()
        session = await served.open()
        try:
            async with aiohttp.ClientSession() as client:
                key = {"Authorization": f"Bearer {session.key}", **headers}
                async with client.post(
                    f"{served.url(session)}/{route}", data=io.BytesIO(body), headers=key
                ) as answer:
                    return answer.status, await answer.text()
        finally:
            await served.close()

    seen, text = asyncio.run(asyncio.wait_for(main(), 60))
    assert seen == status, text[:200]
    if status != 413:
        assert json.loads(text)["error"]["message"]


def test_a_reward_that_is_not_finite_gets_the_status_400_at_once():
    async def main():
        served = Endpoint()
        session = await served.open()
        try:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as client:
                url = served.url(session).removesuffix("/v1") + "/reward"
                seen = []
                for body in (
                    b'{"value": NaN}',
                    b'{"value": 1e999}',
                    b'{"value": 1' + b"0" * 400 + b"}",
                    b'{"value": 1}',
                ):
                    async with client.post(url, data=body) as answer:
                        seen.append(answer.status)
                return seen
        finally:
            await served.close()

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [400, 400, 400, 200]


@pytest.mark.skipif(int(SOMAXCONN.read_text()) < 600, reason="the kernel's own bound is lower")
def test_some_hundred_agents_may_connect_at_the_same_time():
    async def main():
        served = Endpoint()
        session = await served.open()
        try:
            port = int(served.url(session).split(":")[2].split("/")[0])
            # Nothing is taken from the queue while this loop only connects: it holds all that wait.
            waiting = []
            for _ in range(500):
                one = socket.socket()
                one.settimeout(0.5)
                one.connect(("127.0.0.1", port))
                waiting.append(one)
            for one in waiting:
                one.close()
            return len(waiting)
        finally:
            await served.close()

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 500
