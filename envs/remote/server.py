"""The HTTP server of `offbeat envs`: it plays episodes of a suite for actors of other hosts.

::

    GET    /                             who this is, and how many episodes there are
    GET    /v1/facts                     facts of the suite
    POST   /v1/demonstrations            a solved task
    PUT    /v1/clients/CLIENT            the client is still there
    PUT    /v1/episodes/EPISODE          begin an episode
    POST   /v1/episodes/EPISODE/NUMBER   step NUMBER, from 1 on: an action, or why messages are refused
    DELETE /v1/episodes/EPISODE          end it; with ?given_up, by nobody's fault

A request with the number of the last call gets that call's answer. So a client may repeat what it got no answer to.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from envs.base import CodeCaller, HasFacts, Suite, SuiteFacts
from envs.errors import EnvError, ServiceFailed
from envs.remote.sessions import (
    CLOSE_S,
    NAME_LENGTH,
    RemoteAnswer,
    RemoteSession,
    RemoteSessions,
    begin_episode,
    end_episode,
    play_step,
)
from envs.remote.wire import (
    BODY_BYTES,
    FAILED,
    FULL,
    GIVEN_UP,
    PROTOCOL,
    SERVICE,
    UNKNOWN,
    decoded,
    encoded,
    facts_body,
    failure_body,
)
from protocol.security.http import require_token

log = logging.getLogger(__name__)

LEASE_S = 30.0
MOST_EPISODES = 1024
MOST_LOGGED = 64
"""Distinct failures that are logged; all of them reach the clients."""


@dataclass(frozen=True)
class Served:
    """Environment that a server serves, and its settings."""

    ready: Callable[[], Awaitable[tuple[Suite, CodeCaller]]]
    """Returns the suite and what calls its code."""
    about: Mapping[str, Any]
    """Name and fingerprint of the environment, for clients and people."""
    timeout_s: float
    """Longest time of one call, in seconds. A client may ask for less."""
    gauges: Callable[[], Mapping[str, float]] = dict
    blameless: tuple[type[Exception], ...] = (ServiceFailed,)
    """Errors that are nobody's fault."""
    keys: Path | None = None
    """Keys folder with the token; None: no token is asked for."""
    lease_s: float = LEASE_S
    most_episodes: int = MOST_EPISODES
    logged: set[tuple[str, str]] = field(default_factory=set)


class EnvironmentServer:
    """An aiohttp application that plays episodes."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._sessions = RemoteSessions(served.lease_s, served.most_episodes)
        self._counts = {"begun": 0, "failed": 0, "left": 0}
        self.application = app = web.Application(
            middlewares=[require_token(served.keys), _readable], client_max_size=BODY_BYTES
        )
        app.router.add_get("/", self._about)
        app.router.add_get("/v1/facts", self._facts)
        app.router.add_post("/v1/demonstrations", self._demonstration)
        app.router.add_put("/v1/clients/{client}", self._present)
        app.router.add_put("/v1/episodes/{episode}", self._begin)
        app.router.add_post(r"/v1/episodes/{episode}/{number:[1-9]\d{0,8}}", self._step)
        app.router.add_delete("/v1/episodes/{episode}", self._end)
        app.cleanup_ctx.append(self._watching)

    async def _about(self, request: web.Request) -> web.Response:
        counts = {"episodes": len(self._sessions), "clients": self._sessions.clients, **self._counts}
        about = {"offbeat": "environments", "protocol": PROTOCOL, **self._served.about}
        return _response(RemoteAnswer(200, encoded({**about, **counts, "gauges": self._served.gauges()})))

    async def _facts(self, request: web.Request) -> web.Response:
        async def facts(suite: Suite, caller: CodeCaller) -> Any:
            if not isinstance(suite, HasFacts) or not callable(suite.facts):
                return facts_body(SuiteFacts())
            found = await caller.call(suite.facts, what="facts", timeout_s=self._served.timeout_s)
            return facts_body(found if isinstance(found, SuiteFacts) else SuiteFacts())

        return _response(await self._answered(self._with_suite(facts)))

    async def _demonstration(self, request: web.Request) -> web.Response:
        body = decoded(await request.read())

        async def demonstrate(suite: Suite, caller: CodeCaller) -> Any:
            arguments = body.get("index"), body.get("split")
            limit_s = self._served.timeout_s
            try:
                return {
                    "messages": await caller.call(
                        suite.demonstration, *arguments, what="demonstration", timeout_s=limit_s
                    )
                }
            except LookupError as error:
                return {"messages": None, "why": str(error)}

        return _response(await self._answered(self._with_suite(demonstrate)))

    async def _present(self, request: web.Request) -> web.Response:
        self._sessions.heard(_name(request, "client"), time.monotonic())
        return _response(RemoteAnswer(200, encoded({"lease_s": self._sessions.lease_s})))

    async def _begin(self, request: web.Request) -> web.Response:
        name, body = _name(request, "episode"), decoded(await request.read())
        client, data = body.get("client"), body.get("data")
        if not isinstance(client, str) or not 0 < len(client) <= NAME_LENGTH or not isinstance(data, dict):
            raise EnvError("an episode begins with the name of its client, and the data of its task")
        self._sessions.heard(client, time.monotonic())
        session = self._sessions.get(name)
        if session is None:
            session = RemoteSession(name, client)
            if not self._sessions.add(session):
                why = f"it has {len(self._sessions)} episodes, and no room for another one"
                return _response(RemoteAnswer(FULL, encoded({"error": {"message": why}})))
            self._counts["begun"] += 1
        until = time.monotonic() + self._limit_s(body)
        return _response(
            await session.once(0, lambda: self._answered(self._reset(session, dict(data), until)))
        )

    async def _reset(self, session: RemoteSession, data: dict[str, Any], until: float) -> Any:
        async def reset(suite: Suite, caller: CodeCaller) -> Any:
            served = {"suite": self._served.about.get("suite"), "lease_s": self._sessions.lease_s}
            return {**await begin_episode(session, suite, caller, data, until), **served}

        return await self._with_suite(reset)

    async def _step(self, request: web.Request) -> web.Response:
        body = decoded(await request.read())
        number = int(request.match_info["number"])
        if not isinstance(body.get("action") if body.get("refuse") is None else body["refuse"], str):
            raise EnvError("a step has an action, or the reason why messages are refused, which is a text")
        session = self._sessions.get(_name(request, "episode"))
        if session is None:
            why = (
                "there is no such episode: the server was started anew, or its client was silent for too long"
            )
            return _response(RemoteAnswer(UNKNOWN, encoded({"error": {"message": why}})))
        self._sessions.heard(session.client, time.monotonic())
        limit_s = self._limit_s(body)
        return _response(
            await session.once(number, lambda: self._answered(play_step(session, body, limit_s)))
        )

    async def _end(self, request: web.Request) -> web.Response:
        session = self._sessions.pop(_name(request, "episode"))
        if session is not None:
            await end_episode(session, given_up=GIVEN_UP in request.query)
        return _response(RemoteAnswer(200, b"{}"))

    async def _with_suite(self, work: Callable[[Suite, CodeCaller], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(self._served.timeout_s):
                suite, caller = await self._served.ready()
        except TimeoutError:
            raise ServiceFailed(
                "the suite is being made anew, because code has blocked its event loop"
            ) from None
        return await work(suite, caller)

    async def _answered(self, work: Awaitable[Any]) -> RemoteAnswer:
        """Return the answer that a call of the suite's code means, with its error if it has one."""
        try:
            return RemoteAnswer(200, encoded(await work))
        except Exception as error:
            blameless = isinstance(error, self._served.blameless)
            body = failure_body(error, blameless=blameless)
            self._counts["failed"] += 1
            seen = (body["error"]["kind"], body["error"]["place"])
            if seen not in self._served.logged and len(self._served.logged) < MOST_LOGGED:
                self._served.logged.add(seen)
                log.warning(
                    "an episode failed; failures like this are only counted from now on", exc_info=error
                )
            return RemoteAnswer(SERVICE if blameless else FAILED, encoded(body))

    def _limit_s(self, body: Mapping[str, Any]) -> float:
        """Return the time limit of a call: that of the server, or that of the request if it is shorter."""
        asked = body.get("timeout_s")
        good = isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0
        return (
            min(self._served.timeout_s, float(asked))
            if good and asked is not None
            else self._served.timeout_s
        )

    async def _watching(self, application: web.Application) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch(), name="silent clients")
        yield
        watch.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                await asyncio.gather(
                    *(end_episode(session, given_up=True) for session in self._sessions.all())
                )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._sessions.lease_s / 4)
            for session in self._sessions.expired(time.monotonic()):
                log.info("client %s is silent: episode %s ends", session.client, session.name)
                self._counts["left"] += 1
                await end_episode(session, given_up=True)


@web.middleware
async def _readable(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer 400 to a request that cannot be read."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except (EnvError, TypeError) as error:
        return web.json_response({"error": {"message": f"the request cannot be read: {error}"}}, status=400)


def _name(request: web.Request, kind: str) -> str:
    name = request.match_info[kind]
    if len(name) > NAME_LENGTH:
        raise EnvError(f"the name of the {kind} is longer than {NAME_LENGTH} characters")
    return name


def _response(answer: RemoteAnswer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, content_type="application/json")
