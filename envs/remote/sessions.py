"""Episodes of an environment server. Each belongs to a client, and ends when that has been silent for too long."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from envs.base import CodeCaller, Env
from envs.errors import EnvError

NAME_LENGTH = 64
"""Longest name of an episode or a client."""


@dataclass(frozen=True)
class RemoteAnswer:
    """What the server answers to a request."""

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
