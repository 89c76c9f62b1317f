"""Calls the environment of one episode on a server: its beginning, its steps and its end."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from envs.base import CodeCaller, Env, HasGiveUp, HasTools, HasTurnFacts, HasTurnLimit, Suite, can_refuse
from envs.errors import EnvError
from envs.remote.sessions import RemoteSession
from envs.remote.wire import result_body, turn_facts_of

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest time for the end of an episode."""


async def begin(
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


async def play(session: RemoteSession, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
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


async def end(session: RemoteSession, *, given_up: bool) -> None:
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
