"""Suite `remote`: its episodes are played by environment servers, which other hosts may run.

Requests to a server have a deadline, and are repeated while nobody answers.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts, ToolSchema, TurnFacts
from envs.errors import EnvError, ServerLost, ServiceFailed
from envs.remote.wire import BODY_BYTES, FULL, GIVEN_UP, decoded, encoded, error_of, facts_of, result_of
from envs.user_code import absolute_beside_run_file
from protocol.gauges import Gauge, table
from protocol.security.addresses import is_loopback
from protocol.security.http import Access, access

RETRY_S = 0.25
"""Time between two attempts to reach a server."""
PIECE_BYTES = 2**16


class EnvironmentClient:
    """Asks one server. All methods are for one event loop.

    Args:
        url: address of the server, without a slash at the end.
        access: token and certificate.
    """

    def __init__(self, url: str, access: Access) -> None:
        self.url, self._access = url, access
        self.episodes = 0
        """Episodes of this process on the server."""
        self.failed_at = float("-inf")
        """Monotonic time at which the server last did not answer."""
        self._session: aiohttp.ClientSession | None = None
        self._sockets = weakref.WeakSet[socket.socket]()

    async def ask(
        self, method: str, path: str, content: Mapping[str, Any] | None, until: float, *, patient: bool = True
    ) -> dict[str, Any]:
        """Return the content of the server's answer.

        Every request may be repeated, so one without an answer is, until the deadline.

        Args:
            until: monotonic time of the deadline.
            patient: False: do not repeat a request that could not be sent, or that has no answer.

        Raises:
            ServerLost: the server does not answer, or does not have the episode.
            ServiceFailed: nobody is at fault, or the server refuses the request.
            RemoteFailed: the environment failed.
        """
        while True:
            try:
                status, body = await self._once(method, path, content, until)
                if status != FULL:
                    break
                why = str((_content_of_body(body).get("error") or {}).get("message"))
            except TimeoutError:
                self.failed_at = time.monotonic()
                raise ServerLost(f"the environment server {self.url} took too long to answer") from None
            except (aiohttp.ClientError, OSError) as error:
                why = str(error) or type(error).__name__
            self.failed_at = time.monotonic()
            if not patient or time.monotonic() + RETRY_S >= until:
                raise ServerLost(f"the environment server {self.url} does not answer: {why}")
            await asyncio.sleep(RETRY_S)
        if status == 200:
            return decoded(body)
        refused = error_of(status, _content_of_body(body), self.url)
        if isinstance(refused, ServerLost):
            self.failed_at = time.monotonic()
        raise refused

    async def close(self) -> None:
        """Close the connections.

        An encrypted one that a refusal or a cancelled request closed waits for its server's goodbye, for up to 30 s,
        and the session does not know it any more. It is told that its server is gone.
        """
        if self._session is None:
            return
        await self._session.close()
        self._session = None
        for made in self._sockets:
            # One that was closed, or never connected, refuses this.
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                # Their transports have no event for this.
                while any(made.fileno() >= 0 for made in self._sockets):  # noqa: ASYNC110
                    await asyncio.sleep(0)

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket for a connection, and remember it for the end."""
        made = socket.socket(*address[:3])
        self._sockets.add(made)
        return made

    async def _once(
        self, method: str, path: str, content: Mapping[str, Any] | None, until: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            # Each episode may have a request under way.
            connector = aiohttp.TCPConnector(
                limit=0, ssl=self._access.context or True, socket_factory=self._socket
            )
            self._session = aiohttp.ClientSession(
                connector=connector, headers=dict(self._access.headers), timeout=aiohttp.ClientTimeout()
            )
        async with asyncio.timeout(max(0.0, until - time.monotonic())):
            data = None if content is None else encoded(content)
            async with self._session.request(
                method, self.url + path, data=data, allow_redirects=False
            ) as answer:
                return answer.status, await _whole_body(answer)


async def _whole_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        EnvError: it is larger than any that a server sends.
    """
    pieces = bytearray()
    async for piece in answer.content.iter_chunked(PIECE_BYTES):
        pieces += piece
        if len(pieces) > BODY_BYTES:
            raise EnvError(f"an answer of {answer.url.origin()} has more than {BODY_BYTES} bytes")
    return bytes(pieces)


def _content_of_body(body: bytes) -> dict[str, Any]:
    """Return the content of an error's body, which may be that of a server between."""
    try:
        return decoded(body)
    except EnvError:
        return {}


GAUGES = table(
    [Gauge("servers_lost_total", "calls", "calls that no environment server answered, of `remote`", "total")]
)
"""Gauges of the suite."""
GRACE_S = 4.0
"""Time by which a client waits longer than its server's limit, so that the server can name the line that took it."""
CLOSE_S = 4.0
FIRST_LEASE_S = 3.0
"""Lease that a client assumes until its server has told it the right one."""
AVOID_S = 5.0
"""Time for which a server that did not answer gets no new episode, if there are others."""


class RemoteSuite:
    """Suite of one or several environment servers, which all serve one run file.

    Args:
        url: address of a server, or a list of them. An episode begins on the one with the fewest.
        keys: folder with the certificate (`http.crt`) and the token (`http.token`) of the servers. Needed with https,
            and for addresses that are not loopback.
        timeout_s: longest time of one call, in seconds; a server's own limit may be shorter. It has to be 4 s below
            ``actor.env_timeout_s``, or the actor gives up first.

    Raises:
        EnvError: an address or the keys folder cannot be used.
    """

    def __init__(self, url: str | list[str], keys: str = "", timeout_s: float = 25.0) -> None:
        urls = [url] if isinstance(url, str) else url
        if not isinstance(urls, list) or not urls or not all(isinstance(text, str) for text in urls):
            raise EnvError(f"params.url = {url!r}: write an address, or a list of them")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise EnvError(f"params.timeout_s = {timeout_s!r}: write a number above 0")
        self._access = access(Path(keys) if keys else None)
        self._servers = [EnvironmentClient(checked_url(text, keys), self._access) for text in urls]
        self.timeout_s = float(timeout_s)
        self._client = f"{socket.gethostname()[:32]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._suite: object = None
        """Fingerprint of the suite that the servers have; None: no episode has begun."""
        self._present: dict[EnvironmentClient, asyncio.Task[None]] = {}
        """Tasks that tell servers that this client is there."""
        self._orphans = list[tuple[EnvironmentClient, str, bool]]()
        """Episodes that a server may have begun, and that nobody plays: their servers are told to end them, and
        whether that is nobody's fault."""
        self._lost = 0

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the path by which every role finds the keys; see `envs.registry.beside`."""
        keys = params.get("keys")
        if not isinstance(keys, str) or not keys:
            return params
        return {**params, "keys": absolute_beside_run_file(keys, folder)}

    def episode(self) -> Env:
        return cast(Env, _RemoteEpisode(self))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a solved task of the first server. Blocks.

        Raises:
            LookupError: its suite has none.
        """
        found = self._ask_now("POST", "/v1/demonstrations", {"index": index, "split": split})
        if not isinstance(found.get("messages"), list):
            raise LookupError(str(found.get("why")))
        return list(found["messages"])

    def facts(self) -> SuiteFacts:
        """Return the facts of the first server's suite. Blocks."""
        return facts_of(self._ask_now("GET", "/v1/facts", None))

    def gauges(self) -> dict[str, float]:
        """Return the number of calls without an answer."""
        return {"servers_lost_total": float(self._lost)}

    async def close(self) -> None:
        for task in self._present.values():
            task.cancel()
        if self._present:
            await asyncio.wait(self._present.values(), timeout=CLOSE_S)
        for server in self._servers:
            await server.close()

    async def begin(self, name: str, data: Mapping[str, Any]) -> tuple[EnvironmentClient, dict[str, Any]]:
        """Begin an episode on the server that has the fewest. Return the server, and its answer.

        A server that does not answer is left aside. If none does, one may come back until the deadline.

        Raises:
            ServerLost: none of them answers.
            EnvError: the servers have different environments, or the environment failed.
        """
        until = time.monotonic() + self.timeout_s + GRACE_S
        content = {"client": self._client, "data": dict(data), "timeout_s": self.timeout_s}
        # The order is that of the attempts.
        tried = dict[EnvironmentClient, None]()
        while True:
            now = time.monotonic()
            rested = [server for server in self._servers if now - server.failed_at > AVOID_S]
            server = min(
                rested or self._servers,
                key=lambda s: (s.episodes, s.failed_at) if rested else (0, s.failed_at),
            )
            tried[server] = None
            # It counts from now on, so that episodes which begin at the same time go to different servers.
            server.episodes += 1
            if server not in self._present:
                self._present[server] = asyncio.create_task(self._stay_present(server), name="presence")
            try:
                answer = await server.ask("PUT", f"/v1/episodes/{name}", content, until, patient=False)
                self._check(server, answer)
                self._orphans += [(other, name, True) for other in tried if other is not server]
                return server, answer
            except BaseException as error:
                server.episodes -= 1
                if not isinstance(error, ServerLost) or time.monotonic() + RETRY_S >= until:
                    self._lost += isinstance(error, ServerLost)
                    faultless = not isinstance(error, EnvError) or isinstance(error, ServiceFailed)
                    self._orphans += [(other, name, faultless) for other in tried]
                    raise
            if not rested:
                await asyncio.sleep(RETRY_S)

    async def played(
        self, server: EnvironmentClient, path: str, content: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the answer to a step.

        Raises:
            ServerLost: the server does not answer, or has lost the episode.
            EnvError: the environment failed.
        """
        until = time.monotonic() + self.timeout_s + GRACE_S
        try:
            return await server.ask("POST", path, {**content, "timeout_s": self.timeout_s}, until)
        except ServerLost:
            self._lost += 1
            raise

    def _check(self, server: EnvironmentClient, answer: Mapping[str, Any]) -> None:
        """Refuse a server whose environment is another one than that of earlier episodes."""
        suite = answer.get("suite")
        self._suite = suite if self._suite is None else self._suite
        if suite != self._suite:
            raise EnvError(
                f"{server.url} serves another environment than the episodes before had: start the servers with one run "
                "file and equal files"
            )

    async def _stay_present(self, server: EnvironmentClient) -> None:
        """Tell a server that this client is still there, and which episodes nobody plays."""
        lease_s = FIRST_LEASE_S
        while True:
            # A server that does not answer is found by the next step.
            with contextlib.suppress(EnvError):
                if server.episodes:
                    until = time.monotonic() + lease_s
                    told = await server.ask("PUT", f"/v1/clients/{self._client}", None, until, patient=False)
                    lease_s = float(told["lease_s"])
            for orphan in [orphan for orphan in self._orphans if orphan[0] is server]:
                self._orphans.remove(orphan)
                await _end(*orphan)
            await asyncio.sleep(lease_s / 6)

    def _ask_now(self, method: str, path: str, content: Mapping[str, Any] | None) -> dict[str, Any]:
        """Ask the first server from plain code, in a thread that has an event loop of its own."""

        async def ask() -> dict[str, Any]:
            server = EnvironmentClient(self._servers[0].url, self._access)
            try:
                until = time.monotonic() + self.timeout_s
                return await server.ask(method, path, content, until, patient=False)
            finally:
                await server.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask()).result(self.timeout_s + GRACE_S)


class _RemoteEpisode:
    """Episode on a server."""

    def __init__(self, suite: RemoteSuite) -> None:
        self._suite, self._name = suite, secrets.token_hex(12)
        self._server: EnvironmentClient | None = None
        self._tools: Sequence[ToolSchema] = ()
        self._facts: TurnFacts | None = None
        self._limit: Any = None
        self._steps, self._given_up = 0, False
        self.refuses = False
        """True if the environment on the server can refuse messages."""

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._server, answer = await self._suite.begin(self._name, data)
        tools, messages = answer.get("tools"), answer.get("messages")
        self._tools = tools if isinstance(tools, list) else ()
        self._limit, self.refuses = answer.get("turn_limit"), answer.get("refuses") is True
        return cast(list[ChatMessage], messages)

    def tool_schemas(self) -> Sequence[ToolSchema]:
        return self._tools

    def turn_limit(self) -> int | None:
        return cast(int | None, self._limit)

    def turn_facts(self, facts: TurnFacts) -> None:
        self._facts = facts

    async def step(self, action: str) -> StepResult:
        facts = None if self._facts is None else asdict(self._facts)
        return await self._called({"action": action, "facts": facts})

    async def refuse(self, why: str, too_long: bool) -> StepResult:
        return await self._called({"refuse": why, "too_long": too_long})

    def give_up(self) -> None:
        self._given_up = True

    async def close(self) -> None:
        if (server := self._server) is None:
            return
        self._server = None
        server.episodes -= 1
        await _end(server, self._name, self._given_up)

    async def _called(self, content: Mapping[str, Any]) -> StepResult:
        """Return the result of the next call."""
        assert self._server is not None, "a step before reset"
        self._steps += 1
        path = f"/v1/episodes/{self._name}/{self._steps}"
        answer = await self._suite.played(self._server, path, content)
        self._limit = answer.get("turn_limit")
        return result_of(answer)


async def _end(server: EnvironmentClient, name: str, given_up: bool) -> None:
    """End an episode. A server that is gone has none to end.

    Args:
        given_up: it ends by nobody's fault.
    """
    path = f"/v1/episodes/{name}" + (f"?{GIVEN_UP}" if given_up else "")
    with contextlib.suppress(EnvError):
        await server.ask("DELETE", path, None, time.monotonic() + CLOSE_S, patient=False)


def checked_url(url: str, keys: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        EnvError: it is none, or others could read what is sent to it.

    Example:
        >>> checked_url("http://127.0.0.1:5760/", "")
        'http://127.0.0.1:5760'
    """
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
    ):
        raise EnvError(f"params.url = {url!r}: write http://HOST:PORT, or https://HOST:PORT with params.keys")
    if parts.scheme == "https" and not keys:
        raise EnvError(
            f"params.url = {url!r}: https needs params.keys, the folder with http.crt and http.token of the server"
        )
    if parts.scheme == "http" and (keys or not is_loopback(parts.hostname)):
        raise EnvError(
            f"params.url = {url!r}: what is sent to it is not encrypted. Start the server with --keys FOLDER, name "
            "that folder in params.keys, and write https"
        )
    return url.rstrip("/")
