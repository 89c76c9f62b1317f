"""Suite `openenv`: one environment behind a server of Meta's OpenEnv, over its WebSocket protocol."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from envs.base import ChatMessage, Env, Split, StepResult
from envs.calls import without_thought
from envs.errors import EnvError, ServerLost
from envs.gym.suite import ROLES, SuiteOfReturns, filled, written
from envs.reasoning_gym_suite import opening, task_of
from envs.user_code import load_callable

MESSAGE_BYTES = 16 * 2**20
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
    """Answer of a server to a reset or a step."""

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
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise EnvError(f"a message of the OpenEnv server cannot be read ({error!r}): {text:.200}") from None
    if code == REFUSED:
        raise ActionRefused(f"{why} {data.get('errors') or ''}".strip())
    if code == FULL:
        raise ServerLost(f"the OpenEnv server has no room for a further session: {why}")
    raise EnvError(f"the OpenEnv server answered with {code}: {why}")


class OpenEnvSuite(SuiteOfReturns):
    """Suite of one OpenEnv server. A turn is an action, and the index of a task gives its seed.

    Args:
        url: address of the server, ``http://HOST:PORT``.
        action: field of the action that gets the text of a turn, without its thought.
        fields: further fields of every action.
        parse: function ``(text)`` that returns the action as a table, or None if the text names none, as
            ``file.py:function``. It replaces ``action``.
        observe: function ``(observation)`` that returns a text of the observation's table, as ``file.py:function``.
            Empty: the field ``field``, or the whole table.
        field: field of the observation that the model reads. Empty: all fields, with their names.
        reset: further fields of the reset, beside the seed.
        instruction: text of a system message. Empty: there is none.
        prompt: text of the first user message, with ``{observation}``.
        observation: text of every later observation, with ``{observation}`` and ``{reward}``.
        role: role of later observations, "tool" or "user". Some chat templates refuse one of them.
        solved_at: smallest return of a solved episode. None: evaluations know no solved tasks.
        seed: number from which seeds are counted: those of training are even, those of held-out tasks odd.
        timeout_s: longest time of one call of the server, in seconds. ``actor.env_timeout_s`` has to be longer.

    Raises:
        EnvError: a setting is wrong.
    """

    LIBRARY, CODE = "OpenEnv", ("observe", "parse")

    def __init__(
        self,
        url: str,
        action: str = "",
        fields: dict[str, Any] | None = None,
        parse: str = "",
        observe: str = "",
        field: str = "",
        reset: dict[str, Any] | None = None,
        instruction: str = "",
        prompt: str = "{observation}",
        observation: str = "{observation}",
        role: str = "tool",
        solved_at: float | None = None,
        seed: int = 0,
        timeout_s: float = 25.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise EnvError(f"params.url = {url!r}: write the address of a server, as http://127.0.0.1:8000")
        if role not in ROLES:
            raise EnvError(f"params.role = {role!r}: write one of {', '.join(ROLES)}")
        if bool(action) == bool(parse):
            raise EnvError(
                "write one of params.action, a field of the environment's actions, and params.parse"
            )
        if not timeout_s > 0:
            raise EnvError(f"params.timeout_s = {timeout_s!r}: write a number above 0")
        self._url, self._action, self._fields, self._field = url, action, fields or {}, field
        self._parse = load_callable(parse, "parse") if parse else None
        self._observe = load_callable(observe, "observe") if observe else None
        self._reset, self._instruction, self._prompt = reset or {}, instruction, prompt
        self._observation, self._role, self._seed = observation, role, seed
        self.solved_at, self._timeout_s = solved_at, float(timeout_s)
        self.first(Observed({}, None, done=False))
        self.later(Observed({}, None, done=False))

    def episode(self) -> Env:
        return cast(Env, _OpenEnvEpisode(self, OpenEnvSession(self._url, self._timeout_s)))

    def reset_of(self, index: int, split: Split) -> dict[str, Any]:
        """Return the data of a task's reset, with its seed."""
        return {"seed": (self._seed + index) % 2**30 * 2 + (split == "heldout"), **self._reset}

    def action_of(self, text: str) -> dict[str, Any] | None:
        """Return the action of a turn; None if it names none."""
        if self._parse is None:
            return {**self._fields, self._action: without_thought(text).strip()}
        action = self._parse(text)
        return None if action is None else {**self._fields, **action}

    def first(self, seen: Observed) -> list[ChatMessage]:
        """Return the first messages of an episode."""
        return opening(filled(self._prompt, "prompt", {"observation": self._text(seen)}), self._instruction)

    def later(self, seen: Observed) -> ChatMessage:
        """Return the message of a later observation."""
        fields = {"observation": self._text(seen), "reward": f"{seen.reward or 0.0:g}"}
        return {"role": self._role, "content": filled(self._observation, "observation", fields)}

    def refused(self, why: str) -> ChatMessage:
        """Return what the model reads behind a turn that is no action."""
        return {"role": self._role, "content": f"This is no action of the environment. {why}".strip()}

    def _text(self, seen: Observed) -> str:
        table = seen.observation
        if not table:
            return ""
        if self._observe is not None:
            return str(self._observe(table))
        if not self._field:
            return written({name: _plain(value) for name, value in table.items()})
        if self._field not in table:
            raise EnvError(f"params.field = {self._field!r}: an observation has {', '.join(table)}")
        return str(_plain(table[self._field]))


class _OpenEnvEpisode:
    def __init__(self, suite: OpenEnvSuite, session: OpenEnvSession) -> None:
        self._suite, self._session = suite, session
        self._return, self._refused = 0.0, 0

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return self._suite.first(await self._session.reset(self._suite.reset_of(*task_of(data))))

    async def step(self, action: str) -> StepResult:
        chosen = self._suite.action_of(action)
        if chosen is None:
            return self._no_action("")
        try:
            seen = await self._session.step(chosen)
        except ActionRefused as error:
            return self._no_action(str(error))
        reward = seen.reward or 0.0
        self._return += reward
        if not seen.done:
            return StepResult(self._suite.later(seen), rewards={"reward": reward}, info=self._info())
        correct = self._suite.solved(self._return)
        return StepResult(rewards={"reward": reward}, done=True, correct=correct, info=self._info())

    async def close(self) -> None:
        await self._session.close()

    def _no_action(self, why: str) -> StepResult:
        self._refused += 1
        return StepResult(self._suite.refused(why), rewards={"reward": 0.0}, info=self._info())

    def _info(self) -> dict[str, Any]:
        return {"return": self._return, "refused_actions": self._refused}


def _plain(value: Any) -> Any:
    """Return a value of JSON as `written` takes it: maps and lists inside become JSON."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)
