"""Stands between an agent and its session, and notes each request as it came over the wire.

It can also lose the first connection: the request reaches the session, and both connections end before there is an
answer, as when a network fails. The session must then sample once, however the agent asks again.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from unittest.mock import patch
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from envs.agent.endpoint import Endpoint
from envs.agent.session import AgentSession

DROPPED = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
"""Headers of one connection."""
BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Seen:
    """A request, as it came."""

    dialect: str
    """End of its path."""
    streamed: bool
    again: bool
    """Whether its header says that it was sent before."""
    digest: bytes


class Wire:
    """A server that hands requests on to the endpoint.

    Args:
        lose_first: lose the connection of the first request.
    """

    def __init__(self, *, lose_first: bool) -> None:
        self.seen: list[Seen] = []
        self._lose, self._real, self._address = lose_first, "", ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let agents get this server's address in place of the endpoint's."""
        url = Endpoint.url

        def address(endpoint: Endpoint, session: AgentSession) -> str:
            found = urlsplit(url(endpoint, session))
            self._real = f"{found.scheme}://{found.netloc}"
            return self._address + found.path

        with patch.object(Endpoint, "url", address):
            yield

    async def start(self) -> web.AppRunner:
        """Start the server. Return what is to be cleaned up."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    @property
    def dialects(self) -> str:
        """The dialects that were spoken, each once."""
        spoken = [f"{one.dialect}{', streamed' if one.streamed else ''}" for one in self.seen]
        return "; ".join(dict.fromkeys(spoken))

    @property
    def repeated(self) -> str:
        """How the first request was sent again; "" if it was not."""
        first, *later = self.seen
        for one in later:
            if one.digest == first.digest:
                return "the same bytes, and says so" if one.again else "the same bytes"
        return ""

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST":
            dialect = request.path.rpartition("/v1/")[2]
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            streamed = bool(json.loads(body or b"{}").get("stream"))
            self.seen.append(Seen(dialect, streamed, again, blake2b(body).digest()))
            if self._lose:
                self._lose = False
                await self._lose_connection(request, body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout()) as client,
            client.request(
                request.method, self._real + request.path_qs, data=body, headers=headers
            ) as answer,
        ):
            content = await answer.read()
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
        return web.Response(status=answer.status, body=content, headers=kept)

    async def _lose_connection(self, request: web.Request, body: bytes) -> None:
        """Send the request to the session, and end both connections before there is an answer."""
        found = urlsplit(self._real)
        _, writer = await asyncio.open_connection(found.hostname, found.port)
        kept = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
        head = [f"{request.method} {request.path_qs} HTTP/1.1", f"Host: {found.netloc}"]
        head += [*(f"{name}: {value}" for name, value in kept.items()), f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError
