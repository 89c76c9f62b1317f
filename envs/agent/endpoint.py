"""The HTTP server that agents speak to: `http://127.0.0.1:PORT/s/SESSION/v1`. Other hosts reach it only with TLS."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from envs.agent.chat import ChatRequest, Reply, chunks, completion, error_body, error_event, parse_request
from envs.agent.messages import (
    message_answer,
    message_error,
    message_error_event,
    message_events,
    parse_messages_request,
)
from envs.agent.responses import parse_responses_request, response, response_error_event, response_events
from envs.agent.session import AgentCounts, AgentSession, ConversationFull, SessionGivenUp, SessionOver
from envs.errors import EnvError
from protocol.errors import AddressRefused, KeysUnusable
from protocol.security.addresses import is_loopback, is_wildcard, split_address
from protocol.security.http import SERVER_NAME, scheme, server_context, serving

LISTEN = "127.0.0.1:0"


class EndpointPlace(NamedTuple):
    """Where an endpoint listens."""

    host: str
    port: int
    keys: Path | None = None
    """Keys folder with the certificate; None: no TLS."""
    advertised_host: str = ""
    """Host in the address that agents get; "": that at which it listens, or this machine's name."""

    def url(self, port: int) -> str:
        """Return the address that agents get.

        Example:
            >>> EndpointPlace("::1", 0).url(5761), EndpointPlace("0.0.0.0", 0, Path("keys"), "offbeat").url(5761)
            ('http://[::1]:5761', 'https://offbeat:5761')
        """
        host = self.advertised_host or (socket.gethostname() if is_wildcard(self.host) else self.host)
        return f"{scheme(self.keys)}://{f'[{host}]' if ':' in host else host}:{port}"


def place_of(listen: str, keys: str, advertised_host: str) -> EndpointPlace:
    """Return the place that the parameters name.

    Raises:
        EnvError: other hosts can reach it and there is no TLS, or the keys folder cannot be used.

    Example:
        >>> place_of("0.0.0.0:0", "", "")
        Traceback (most recent call last):
        envs.errors.EnvError: params.listen = '0.0.0.0:0': other hosts can reach it, and nothing is encrypted; make \
keys with `offbeat keys make FOLDER`, and name the folder in params.keys
    """
    folder = Path(keys) if keys else None
    if folder is None and not is_loopback(str(listen).rpartition(":")[0]):
        raise EnvError(
            f"params.listen = {listen!r}: other hosts can reach it, and nothing is encrypted; make keys with `offbeat "
            "keys make FOLDER`, and name the folder in params.keys"
        )
    try:
        host, port = split_address("params.listen", str(listen), folder)
        if folder is not None:
            server_context(folder)
    except (AddressRefused, KeysUnusable) as error:
        raise EnvError(str(error)) from None
    if folder is not None and not advertised_host and not is_loopback(str(listen).rpartition(":")[0]):
        raise EnvError(
            f"params.listen = {listen!r}: the certificate of {keys} is not for this host's name or address, so no "
            f'agent could check it; set params.advertised_host = "{SERVER_NAME}", and let that name lead to this host '
            "where agents run"
        )
    return EndpointPlace(host, port, folder, advertised_host)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATH = "/s/{session}/v1{again:(/v1)?}/messages"
"""Clients of this API add `/v1` to the base URL. So it may stand twice, and agents may use their base URL as it is."""


def in_messages_form(handle: Handler) -> Handler:
    """Return a handler for requests of Anthropic's API, from one for requests of OpenAI's.

    The key may come as `x-api-key`, and errors have the form that clients of this API read.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers and "x-api-key" in request.headers:
            headers = {"Authorization": f"Bearer {request.headers['x-api-key']}", **request.headers}
            # Other bytes than those of ASCII cannot be written into a header again.
            request = request.clone(headers={name: v for name, v in headers.items() if v.isascii()})
        try:
            return await handle(request)
        except web.HTTPException as error:
            error.text = json.dumps(message_error(error.status, error.text or error.reason))
            error.content_type = "application/json"
            raise

    return handler


BODY_BYTES = 16 * 2**20
"""Largest body of a request: four bytes a token for contexts of four million. A larger one gets the status 413."""
MOST_VALUES = 500_000
"""Values of JSON that a body may have. Each of them costs some hundred bytes once it is read."""
INLINE_BYTES = 256 * 1024
"""Bodies above this size are read in a thread, beside the requests of other agents."""
SHUTDOWN_S = 2.0
"""Time that running requests get when the endpoint ends."""
KEEP_ALIVE = b": keep-alive\n\n"
"""Comment that keeps the connection of a stream that waits; clients and proxies close silent ones."""
KEEP_ALIVE_S = 3.0
RETRY_AFTER_S = "1"
HUNG_UP = 499
"""Status, for logs only, of a request whose client has closed the connection."""
MODEL = "policy"
"""Name of the model that the endpoint lists. Requests may name any."""


class Dialect(NamedTuple):
    """Form that a route reads and writes."""

    path: str
    prefix: str
    """Beginning of the ids of its answers."""
    parse: Callable[[bytes], ChatRequest]
    body: Callable[[Reply, ChatRequest, str, int], dict[str, Any]]
    events: Callable[[Reply, ChatRequest, str, int], Iterator[bytes]]
    error: Callable[[int, dict[str, Any]], bytes]
    """Returns the event that ends a stream without an answer."""


DIALECTS = (
    Dialect("chat/completions", "chatcmpl", parse_request, completion, chunks, error_event),
    Dialect("responses", "resp", parse_responses_request, response, response_events, response_error_event),
)
MESSAGES = Dialect(
    "messages", "msg", parse_messages_request, message_answer, message_events, message_error_event
)


class Endpoint:
    """The server and its sessions.

    Args:
        place: where it listens; None: the loopback address.
    """

    def __init__(self, place: EndpointPlace | None = None) -> None:
        self._place = place or place_of(LISTEN, "", "")
        self._sessions: dict[str, AgentSession] = {}
        self._running: AsyncExitStack | None = None
        self._starting = asyncio.Lock()
        self._address = ""
        self._count = 0
        self.counts = AgentCounts()

    async def open(self) -> AgentSession:
        """Open a session, and start the server if it does not run yet."""
        async with self._starting:
            if self._running is None:
                await self._start()
        self._count += 1
        session = AgentSession(f"{self._count}", self.counts)
        self._sessions[session.name] = session
        return session

    def url(self, session: AgentSession) -> str:
        """Return the base URL that the session's agent gets."""
        return f"{self._address}/s/{session.name}/v1"

    def close_session(self, session: AgentSession, why: SessionOver | None = None) -> None:
        """End a session. Its later requests get the status 410, which clients do not repeat.

        Args:
            why: the error of requests that wait; see `AgentSession.end`.
        """
        session.end(why)
        self._sessions.pop(session.name, None)

    async def close(self) -> None:
        """End all sessions, and the server."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        if self._running is not None:
            await self._running.aclose()
            self._running = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES)
        for dialect in DIALECTS:
            app.router.add_post(f"/s/{{session}}/v1/{dialect.path}", partial(self._turn, dialect))
        app.router.add_post(PATH, in_messages_form(partial(self._turn, MESSAGES)))
        app.router.add_get("/s/{session}/v1/models", self._models)
        app.router.add_post("/s/{session}/reward", self._reward)
        app.router.add_post("/s/{session}/end", self._end)
        stack = AsyncExitStack()
        host, port, keys = self._place.host, self._place.port, self._place.keys
        bound = await stack.enter_async_context(serving(app, host, port, keys, shutdown_s=SHUTDOWN_S))
        self._running, self._address = stack, self._place.url(bound)

    def _session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise _error(web.HTTPGone, "this episode has ended, or never was")
        if not session.lets_in(request.headers.get("Authorization", "")):
            raise _error(web.HTTPUnauthorized, "the API key is not that of this session")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "offbeat"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        try:
            session.report(json.loads(await _body(request)))
        except (EnvError, ValueError, OverflowError, RecursionError) as error:
            raise _error(web.HTTPBadRequest, str(error)) from None
        return web.json_response({})

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.leave()
        self.close_session(session, SessionOver("the session was ended"))
        return web.json_response({})

    async def _turn(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answered(dialect, request)
        except ConnectionResetError:
            # The client has hung up. Nobody reads this, and the answer waits in case it comes again.
            return web.Response(status=HUNG_UP)

    async def _answered(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await _body(request)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            parsed = (
                _parsed(dialect, body)
                if len(body) <= INLINE_BYTES
                else await asyncio.to_thread(_parsed, dialect, body)
            )
        except EnvError as error:
            self.counts.refused += 1
            raise _refusal(error) from None
        self.counts.fields_ignored += parsed.fields_ignored
        asking = asyncio.ensure_future(session.ask(body, parsed, partial(_waits, request), again=again))
        stream: web.StreamResponse | None = None
        try:
            while not (await asyncio.wait({asking}, timeout=KEEP_ALIVE_S))[0]:
                if parsed.stream:
                    stream = stream or await _opened(request)
                    await stream.write(KEEP_ALIVE)
            asked = asking.result()
        except EnvError as error:
            if stream is None:
                raise _refusal(error) from None
            await stream.write(dialect.error(*_error_of(error)))
            return stream
        finally:
            # Only this wait ends: what is asked goes on, because the client may come again.
            asking.cancel()
        name, now = f"{dialect.prefix}-{session.name}-{asked.number}", int(time.time())
        reply = asked.answer.result()
        if not parsed.stream:
            asked.delivered |= _waits(request)
            return web.json_response(dialect.body(reply, parsed, name, now))
        stream = stream or await _opened(request)
        for event in dialect.events(reply, parsed, name, now):
            await stream.write(event)
        # A client may hang up behind the last event.
        asked.delivered |= _waits(request)
        await stream.write_eof()
        return stream


async def _body(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPUnsupportedMediaType: it is compressed. A few bytes could stand for very many.
        HTTPRequestEntityTooLarge: it has more than `BODY_BYTES`.
    """
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise _error(web.HTTPUnsupportedMediaType, "the body is compressed; send it as it is")
    if (request.content_length or 0) > BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(BODY_BYTES, request.content_length or 0)
    return await request.read()


async def _opened(request: web.Request) -> web.StreamResponse:
    """Begin a stream of events."""
    stream = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    await stream.prepare(request)
    return stream


def _waits(request: web.Request) -> bool:
    """Return whether the client of a request is still connected."""
    return request.transport is not None and not request.transport.is_closing()


def _parsed(dialect: Dialect, body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        EnvError: it cannot be read. Clients repeat a status of 500, so whatever goes wrong here is the request's fault.
    """
    if sum(body.count(sign) for sign in (b",", b"[", b"{", b":")) > MOST_VALUES:
        raise EnvError(f"the body has more than {MOST_VALUES} values")
    try:
        return dialect.parse(body)
    except (TypeError, AttributeError, ValueError, LookupError, RecursionError) as error:
        raise EnvError(f"the request cannot be read: {type(error).__name__}: {error}") from error


def _error_of(error: EnvError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    match error:
        case SessionGivenUp():
            return web.HTTPServiceUnavailable.status_code, error_body(str(error), kind="server_error")
        case SessionOver() | ConversationFull():
            # Agents know this code: the conversation cannot go on.
            return web.HTTPBadRequest.status_code, error_body(str(error), "context_length_exceeded")
        case _:
            return web.HTTPBadRequest.status_code, error_body(str(error))


def _refusal(error: EnvError) -> web.HTTPError:
    status, body = _error_of(error)
    kind: type[web.HTTPError] = web.HTTPServiceUnavailable if status == 503 else web.HTTPBadRequest
    return _http_error(kind, body)


def _error(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    return _http_error(kind, error_body(message))


def _http_error(kind: type[web.HTTPError], body: dict[str, Any]) -> web.HTTPError:
    headers = {"Retry-After": RETRY_AFTER_S} if kind is web.HTTPServiceUnavailable else None
    error: Any = kind(text=json.dumps(body), content_type="application/json", headers=headers)
    return error  # type: ignore[no-any-return]
