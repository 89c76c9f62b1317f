"""The HTTP server that agents speak to: `http://127.0.0.1:PORT/s/SESSION/v1`.

It runs in the event loop of the environments, and listens on the loopback address only.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from envs.agent.chat import ChatRequest, Reply, chunks, completion, error_body, parse_request
from envs.agent.messages import message_answer, message_events, parse_messages_request
from envs.agent.messages_route import PATH as MESSAGES_PATH
from envs.agent.messages_route import in_messages_form
from envs.agent.responses import parse_responses_request, response, response_events
from envs.agent.session import AgentSession, SessionOver
from envs.errors import EnvError

BODY_BYTES = 64 * 2**20
"""Largest body of a request."""
HOST = "127.0.0.1"
MODEL = "policy"
"""Name of the model that the endpoint lists. Requests may name any."""


class Dialect(NamedTuple):
    """What a route reads and writes."""

    path: str
    prefix: str
    """Beginning of the ids of its answers."""
    parse: Callable[[bytes], ChatRequest]
    body: Callable[[Reply, ChatRequest, str, int], dict[str, Any]]
    events: Callable[[Reply, ChatRequest, str, int], Iterator[bytes]]


DIALECTS = (
    Dialect("chat/completions", "chatcmpl", parse_request, completion, chunks),
    Dialect("responses", "resp", parse_responses_request, response, response_events),
)
MESSAGES = Dialect("messages", "msg", parse_messages_request, message_answer, message_events)


class Endpoint:
    """The server and its sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._address = ""
        self._count = 0

    async def open(self) -> AgentSession:
        """Open a session, and start the server if it does not run yet."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        self._count += 1
        session = AgentSession(f"{self._count}")
        self._sessions[session.name] = session
        return session

    def url(self, session: AgentSession) -> str:
        """Return the base URL that the session's agent gets."""
        return f"{self._address}/s/{session.name}/v1"

    def close_session(self, session: AgentSession) -> None:
        """End a session. Its later requests get the status 410, which clients do not repeat."""
        session.end()
        self._sessions.pop(session.name, None)

    async def close(self) -> None:
        """End all sessions, and the server."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES)
        for dialect in DIALECTS:
            app.router.add_post(f"/s/{{session}}/v1/{dialect.path}", partial(self._turn, dialect))
        app.router.add_post(MESSAGES_PATH, in_messages_form(partial(self._turn, MESSAGES)))
        app.router.add_get("/s/{session}/v1/models", self._models)
        app.router.add_post("/s/{session}/reward", self._reward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self._runner = runner
        self._address = f"http://{HOST}:{runner.addresses[0][1]}"

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
            session.report(json.loads(await request.read()))
        except (EnvError, ValueError, OverflowError, RecursionError) as error:
            raise _error(web.HTTPBadRequest, str(error)) from None
        return web.json_response({})

    async def _turn(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await request.read()
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            parsed = _parsed(dialect, body)
            asked = await session.ask(body, parsed, partial(_waits, request), again=again)
        except SessionOver as error:
            # Agents know this code: the conversation cannot go on.
            raise _error(web.HTTPBadRequest, str(error), "context_length_exceeded") from None
        except EnvError as error:
            raise _error(web.HTTPBadRequest, str(error)) from None
        name, now = f"{dialect.prefix}-{session.name}-{asked.number}", int(time.time())
        reply = asked.answer.result()
        if not parsed.stream:
            asked.delivered |= _waits(request)
            return web.json_response(dialect.body(reply, parsed, name, now))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for event in dialect.events(reply, parsed, name, now):
            await response.write(event)
        await response.write_eof()
        asked.delivered |= _waits(request)
        return response


def _waits(request: web.Request) -> bool:
    """Return whether the client of a request is still connected."""
    return request.transport is not None and not request.transport.is_closing()


def _parsed(dialect: Dialect, body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        EnvError: it cannot be read. Clients repeat a status of 500, so whatever goes wrong here is the request's fault.
    """
    try:
        return dialect.parse(body)
    except (TypeError, AttributeError, ValueError, LookupError, RecursionError) as error:
        raise EnvError(f"the request cannot be read: {type(error).__name__}: {error}") from error


def _error(kind: type[web.HTTPError], message: str, code: str | None = None) -> web.HTTPError:
    error: Any = kind(text=json.dumps(error_body(message, code)), content_type="application/json")
    return error  # type: ignore[no-any-return]
