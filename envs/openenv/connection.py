"""One session of an OpenEnv server, which has an environment of its own for each WebSocket.

The protocol, as openenv-core 0.3 has it: the client sends ``{"type": "reset", "data": {...}}`` or ``{"type": "step",
"data": ACTION}``, and gets ``{"type": "observation", "data": {"observation", "reward", "done"}}`` or ``{"type":
"error", "data": {"message", "code"}}``. ``{"type": "close"}`` ends the session. Nothing of OpenEnv is imported.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from envs.errors import EnvError, ServerLost

MESSAGE_BYTES = 64 * 2**20
"""Largest message of a server."""
RETRY_S = 0.5
"""Time between two attempts to get a session."""
CLOSE_S = 2.0
"""Longest time for the end of a session."""
REFUSED = "VALIDATION_ERROR"
"""Code of an action that the environment cannot read."""
FULL = "CAPACITY_REACHED"
"""Code of a server that has no room for a further session."""


class ActionRefused(EnvError):
    """The environment cannot read an action; the message is the server's."""


@dataclass(frozen=True)
class Observed:
    """What a server answers to a reset or a step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class OpenEnvSession:
    """A session. Its methods are for one event loop.

    Args:
        url: address of the server, ``http(s)://`` or ``ws(s)://``.
        timeout_s: longest time of one message and its answer, and of all attempts to get a session.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url.rstrip("/") + "/ws", timeout_s
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, data: Mapping[str, Any]) -> Observed:
        """Begin the session. A server that does not answer, or is full, is asked again until the deadline.

        Raises:
            ServerLost: no server answers, or it is full.
            EnvError: the environment failed.
        """
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                await self._connect(max(0.0, until - time.monotonic()))
                return await self._ask("reset", data, max(0.0, until - time.monotonic()))
            except ServerLost:
                await self.close()
                if time.monotonic() + RETRY_S >= until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Take an action.

        Raises:
            ActionRefused: the environment cannot read it.
            ServerLost: the server does not answer, or has closed the session.
            EnvError: the environment failed.
        """
        return await self._ask("step", action, self._timeout_s)

    async def close(self) -> None:
        """End the session."""
        socket, client, self._socket, self._client = self._socket, self._client, None, None
        try:
            async with asyncio.timeout(CLOSE_S):
                if socket is not None and not socket.closed:
                    await socket.send_json({"type": "close"})
                    await socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError):
            # The server ends a session whose connection is gone.
            pass
        finally:
            if client is not None:
                await client.close()

    async def _connect(self, seconds: float) -> None:
        # The deadline of a message is asyncio's, because it spans sending and receiving.
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout())
        try:
            async with asyncio.timeout(seconds):
                self._socket = await self._client.ws_connect(self._url, max_msg_size=MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise ServerLost(f"the OpenEnv server {self._url} does not answer: {why}") from None

    async def _ask(self, kind: str, data: Mapping[str, Any], seconds: float) -> Observed:
        assert self._socket is not None, "step before reset"
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_json({"type": kind, "data": dict(data)})
                message = await self._socket.receive()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = str(error) or f"no answer to {kind} in {self._timeout_s:g} s"
            raise ServerLost(f"the OpenEnv server {self._url}: {why}") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ServerLost(f"the OpenEnv server {self._url} has closed the session")
        return observed(message.data)


def observed(text: str) -> Observed:
    """Return what a server's message says.

    Raises:
        ActionRefused: the environment cannot read the action.
        ServerLost: the server is full.
        EnvError: the environment failed, or the message is none of the protocol.

    Example:
        >>> observed('{"type": "observation", "data": {"observation": {"text": "Hi"}, "reward": 1, "done": false}}')
        Observed(observation={'text': 'Hi'}, reward=1.0, done=False)
    """
    try:
        content = json.loads(text)
        kind, data = content["type"], content["data"]
        if kind == "observation":
            reward = data.get("reward")
            number = None if reward is None else float(reward)
            return Observed(dict(data["observation"]), number, bool(data.get("done")))
        why, code = str(data["message"]), str(data.get("code"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EnvError(f"a message of the OpenEnv server cannot be read ({error!r}): {text:.200}") from None
    if code == REFUSED:
        raise ActionRefused(f"{why} {data.get('errors') or ''}".strip())
    if code == FULL:
        raise ServerLost(f"the OpenEnv server has no room for a further session: {why}")
    raise EnvError(f"the OpenEnv server answered with {code}: {why}")
