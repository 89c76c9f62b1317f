"""The requests of one agent: each waits here until the episode answers it. All on one event loop."""

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from envs.agent.chat import ChatRequest, Reply
from envs.errors import EnvError


@dataclass(eq=False)
class Asked:
    """A request and its answer to come."""

    request: ChatRequest
    digest: bytes
    number: int
    answer: "asyncio.Future[Reply]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SessionOver(EnvError):
    """The episode has ended, and with it the session of its agent."""


class AgentSession:
    """What an agent asks, in order, and the reward that it may report.

    Args:
        name: the session's part of the URL.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = secrets.token_urlsafe(24)
        """Secret of the session, the agent's API key."""
        self.rewards: dict[str, float] | None = None
        """Rewards that were reported over HTTP; None: none were."""
        self.over = False
        self._asked: asyncio.Queue[Asked] = asyncio.Queue()
        self._open: Asked | None = None
        self._count = 0

    def lets_in(self, authorization: str) -> bool:
        """Return whether an Authorization header has the session's key."""
        scheme, _, key = authorization.partition(" ")
        given = key.encode(errors="surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self.key.encode())

    async def ask(self, body: bytes, request: ChatRequest, *, again: bool) -> tuple[Reply, int]:
        """Hand a request to the episode. Return the answer, and the number of the request.

        Args:
            again: the client says that it sends the request once more. If its bytes are those of the last request,
                it gets the same answer, and nothing is sampled twice. While that one waits for its answer, equal bytes
                are taken for a repetition in any case.

        Raises:
            SessionOver: the episode has ended.
            EnvError: an earlier request is not answered yet.
        """
        if self.over:
            raise SessionOver("this episode has ended; no further turn is sampled")
        digest, last = blake2b(body, digest_size=16).digest(), self._open
        if last is not None and last.digest == digest and (again or not last.answer.done()):
            return await asyncio.shield(last.answer), last.number
        if last is not None and not last.answer.done():
            raise EnvError(
                "the agent sent a request before its last one was answered; an episode is one conversation"
            )
        self._open = asked = Asked(request, digest, self._count)
        self._count += 1
        self._asked.put_nowait(asked)
        # A client that hangs up does not end the sampling: it may ask once more.
        return await asyncio.shield(asked.answer), asked.number

    async def next_request(self) -> Asked:
        """Wait for the next request of the agent."""
        return await self._asked.get()

    def end(self) -> None:
        """End the session: what still waits for an answer gets an error."""
        self.over = True
        if self._open is not None and not self._open.answer.done():
            self._open.answer.set_exception(
                SessionOver("the episode has ended at its limit of turns or tokens")
            )
            # The agent may be gone; then nobody reads this error.
            self._open.answer.exception()

    def report(self, content: Any) -> None:
        """Note the rewards of `POST /reward`: ``{"value": 1.0}`` or ``{"rewards": {"exact": 1.0}}``.

        Raises:
            EnvError: the content is something else.
        """
        found = content.get("rewards", content.get("value")) if isinstance(content, dict) else None
        self.rewards = rewards_of(found)


def rewards_of(value: Any) -> dict[str, float]:
    """Return rewards by name. A number has the name "reward".

    Raises:
        EnvError: it is neither a number nor a table of numbers.

    Example:
        >>> rewards_of(True), rewards_of({"exact": 1, "brief": 0.5})
        ({'reward': 1.0}, {'exact': 1.0, 'brief': 0.5})
    """
    table = value if isinstance(value, dict) else {"reward": value}
    if not table or not all(isinstance(n, str) and isinstance(v, int | float) for n, v in table.items()):
        raise EnvError(f"the agent's reward is {value!r:.200}; give a number, or a table of numbers by name")
    return {name: float(number) for name, number in table.items()}
