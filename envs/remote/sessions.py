"""Episodes of an environment server: each belongs to a client, and ends when that has been silent for too long."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.base import CodeCaller, Env, HasGiveUp, HasTools, HasTurnFacts, HasTurnLimit, Suite, can_refuse
from envs.errors import EnvError
from envs.remote.wire import result_body, turn_facts_of

NAME_LENGTH = 64
"""Longest name of an episode or a client."""


@dataclass(frozen=True)
class RemoteAnswer:
    """Answer of the server to a request."""

    status: int
    body: bytes


@dataclass(eq=False)
class RemoteSession:
    """One episode: its environment, and its last call, which a client may repeat."""

    name: str
    client: str
    env: Env | None = None
    caller: CodeCaller | None = None
    number: int = -1
    """Number of the last call: 0 is `reset`, 1 the first step."""
    running: "asyncio.Task[RemoteAnswer] | None" = field(default=None, repr=False)

    async def once(self, number: int, work: Callable[[], Awaitable[RemoteAnswer]]) -> RemoteAnswer:
        """Do a call, or wait for it if it was begun before: what a client repeats is done once.

        Raises:
            EnvError: the call is neither the last one nor the next one.
        """
        if number != self.number or self.running is None:
            done = self.running is None or self.running.done()
            if number != self.number + 1 or not done:
                raise EnvError(f"call {number} of episode {self.name} does not follow call {self.number}")
            self.number = number
            self.running = asyncio.ensure_future(_awaited(work))
        # A client that hangs up does not end the call: it may ask once more.
        return await asyncio.shield(self.running)


async def _awaited(work: Callable[[], Awaitable[RemoteAnswer]]) -> RemoteAnswer:
    return await work()


class RemoteSessions:
    """All episodes of a server, and when their clients were last heard of. Pure but for the episodes' own tasks.

    Args:
        lease_s: silence after which a client's episodes end, in seconds.
        most: largest number of episodes.

    Example:
        >>> sessions = RemoteSessions(lease_s=30.0, most=2)
        >>> sessions.heard("actor-0", now=0.0)
        >>> sessions.add(RemoteSession("e1", "actor-0"))
        True
        >>> sessions.expired(now=29.0), [session.name for session in sessions.expired(now=31.0)]
        ([], ['e1'])
    """

    def __init__(self, lease_s: float, most: int) -> None:
        self.lease_s, self._most = lease_s, most
        self._sessions: dict[str, RemoteSession] = {}
        self._heard: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> int:
        """Number of clients that were heard of."""
        return len(self._heard)

    def heard(self, client: str, now: float) -> None:
        """Note that a client is there."""
        self._heard[client] = now

    def get(self, name: str) -> RemoteSession | None:
        """Return an episode, or None if there is none of this name."""
        return self._sessions.get(name)

    def add(self, session: RemoteSession) -> bool:
        """Add an episode. Return whether there is room for it."""
        if len(self._sessions) >= self._most:
            return False
        self._sessions[session.name] = session
        return True

    def pop(self, name: str) -> RemoteSession | None:
        """Remove an episode and return it."""
        return self._sessions.pop(name, None)

    def expired(self, now: float) -> list[RemoteSession]:
        """Forget silent clients. Remove and return their episodes."""
        silent = {client for client, heard in self._heard.items() if now - heard > self.lease_s}
        for client in silent:
            del self._heard[client]
        return [self._sessions.pop(s.name) for s in list(self._sessions.values()) if s.client in silent]

    def all(self) -> list[RemoteSession]:
        """Remove and return all episodes."""
        found = list(self._sessions.values())
        self._sessions.clear()
        return found


log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest time for the end of an episode."""


async def begin_episode(
    session: RemoteSession, suite: Suite, caller: CodeCaller, data: dict[str, Any], until: float
) -> dict[str, Any]:
    """Make the environment of an episode and reset it. Return what its client needs to know.

    Args:
        until: monotonic time of the deadline.
    """

    def left_s() -> float:
        return until - time.monotonic()

    session.caller = caller
    session.env = env = await caller.call(suite.episode, what="episode", timeout_s=left_s(), on_loop=True)
    messages = await caller.call(env.reset, data, what="reset", timeout_s=left_s())
    tools = []
    if isinstance(env, HasTools):
        tools = list(
            await caller.call(env.tool_schemas, what="tool_schemas", timeout_s=left_s(), on_loop=True)
        )
    limit = await _turn_limit(env, caller, left_s())
    return {"messages": messages, "tools": tools, "turn_limit": limit, "refuses": can_refuse(env)}


async def play_step(session: RemoteSession, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Give an environment an action, or say why its messages are refused. Return its result.

    Args:
        body: of the request, with ``action`` or ``refuse``.
        limit_s: longest time of each call.

    Raises:
        EnvError: the episode has not begun, or cannot refuse messages.
    """
    env, caller = session.env, session.caller
    if env is None or caller is None:
        raise EnvError("a step before reset, or behind one that failed")
    found = result_body(await _result(env, caller, body, limit_s))
    return {**found, "turn_limit": None if found["done"] else await _turn_limit(env, caller, limit_s)}


async def end_episode(session: RemoteSession, *, given_up: bool) -> None:
    """End an episode: what still runs in it, and its environment. What goes wrong is logged.

    Args:
        given_up: it ends by nobody's fault, and its task runs again.
    """
    running: asyncio.Task[Any] | None = session.running
    if running is not None and not running.done():
        running.cancel()
        await asyncio.wait({running}, timeout=CLOSE_S)
    env, caller = session.env, session.caller
    if env is None or caller is None:
        return
    try:
        if given_up and isinstance(env, HasGiveUp):
            await caller.call(env.give_up, what="give_up", timeout_s=CLOSE_S, on_loop=True)
        await caller.call(env.close, what="close", timeout_s=CLOSE_S)
    except Exception as error:
        log.warning("episode %s did not close: %r", session.name, error)


async def _result(env: Env, caller: CodeCaller, body: Mapping[str, Any], limit_s: float) -> Any:
    if (why := body.get("refuse")) is not None:
        if not can_refuse(env):
            raise EnvError(f"the environment cannot refuse messages, and these cannot be used: {why}")
        too_long = bool(body.get("too_long"))
        return await caller.call(env.refuse, why, too_long, what="refuse", timeout_s=limit_s)
    facts = turn_facts_of(body.get("facts"))
    if facts is not None and isinstance(env, HasTurnFacts):
        await caller.call(env.turn_facts, facts, what="turn_facts", timeout_s=limit_s, on_loop=True)
    return await caller.call(env.step, body["action"], what="step", timeout_s=limit_s)


async def _turn_limit(env: Env, caller: CodeCaller, timeout_s: float) -> Any:
    """Return the most tokens that the environment wants in the next answer; None: it does not say."""
    if not isinstance(env, HasTurnLimit):
        return None
    return await caller.call(env.turn_limit, what="turn_limit", timeout_s=timeout_s, on_loop=True)
