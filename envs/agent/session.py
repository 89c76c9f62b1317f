"""The requests of one agent: each waits here until the episode answers it. All on one event loop."""

import asyncio
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from envs.agent.chat import ChatRequest, Reply
from envs.errors import EnvError

HANG_UP_S = 0.1
"""Time in which a connection that a client has closed is seen to be closed."""
Alive = Callable[[], bool]
"""Returns whether a client still waits for its answer."""


@dataclass(eq=False)
class Asked:
    """A request and its answer to come."""

    request: ChatRequest
    digest: bytes
    number: int
    clients: list[Alive]
    """The clients that ask, more than one if the request was repeated."""
    delivered: bool = False
    """Whether a client has got the answer."""
    answer: "asyncio.Future[Reply]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def missed(self) -> bool:
        """Whether no client has got the answer, and none waits for it any more."""
        return not self.delivered and not any(alive() for alive in self.clients)


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
        self._waiting: asyncio.Queue[Asked] = asyncio.Queue()
        self._asked: list[Asked] = []

    def lets_in(self, authorization: str) -> bool:
        """Return whether an Authorization header has the session's key."""
        scheme, _, key = authorization.partition(" ")
        given = key.encode(errors="surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self.key.encode())

    async def ask(self, body: bytes, request: ChatRequest, alive: Alive, *, again: bool) -> Asked:
        """Hand a request to the episode. Return it with its answer.

        Several requests may wait at a time, as those of sub-agents; they are answered in the order in which they came.
        A request that comes again gets the answer of the first, and nothing is sampled twice. It is taken for a
        repetition if its bytes are those of an earlier one, and the client says that it asks again, or the earlier
        client has hung up before it got its answer.

        Args:
            alive: returns whether the client still waits.
            again: the client says that it sends the request once more.

        Raises:
            SessionOver: the episode has ended.
        """
        digest = blake2b(body, digest_size=16).digest()
        asked = self._repeated(digest, again)
        if asked is None and any(asked.digest == digest for asked in self._asked):
            # Word that the earlier client has hung up may come behind its new request.
            await asyncio.sleep(HANG_UP_S)
            asked = self._repeated(digest, again)
        if self.over:
            raise SessionOver("this episode has ended; no further turn is sampled")
        if asked is None:
            asked = Asked(request, digest, len(self._asked), [alive])
            self._asked.append(asked)
            self._waiting.put_nowait(asked)
        else:
            asked.clients.append(alive)
        # A client that hangs up does not end the sampling: it may ask once more.
        await asyncio.shield(asked.answer)
        return asked

    def _repeated(self, digest: bytes, again: bool) -> Asked | None:
        """Return the last request with these bytes that this one repeats."""
        known = [asked for asked in reversed(self._asked) if asked.digest == digest]
        missed = [asked for asked in known if asked.missed]
        return next(iter([*missed, *(known if again else [])]), None)

    async def next_request(self) -> Asked:
        """Wait for the next request of the agent."""
        return await self._waiting.get()

    def end(self) -> None:
        """End the session: what still waits for an answer gets an error."""
        self.over = True
        for asked in self._asked:
            if not asked.answer.done():
                asked.answer.set_exception(
                    SessionOver("the episode has ended at its limit of turns or tokens")
                )
                # The agent may be gone; then nobody reads this error.
                asked.answer.exception()

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
