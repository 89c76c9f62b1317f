"""The requests of one agent: each waits here until the episode answers it. All on one event loop, and counted."""

import asyncio
import hmac
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

from envs.agent.chat import ChatRequest, Reply
from envs.errors import EnvError
from protocol.gauges import Gauge, table

GAUGES = table(
    [
        Gauge(
            "agent_requests_total", "requests", "requests of agents that were answered, of `agent`", "total"
        ),
        Gauge(
            "agent_repeats_total", "requests", "requests that came again, and got the first answer", "total"
        ),
        Gauge(
            "agent_refused_total",
            "requests",
            "requests that cannot be read, or that the chat template cannot render",
            "total",
        ),
        Gauge(
            "agent_withdrawn_total",
            "requests",
            "requests whose client hung up and did not come again, so that their sampling ended",
            "total",
        ),
        Gauge("agent_fields_ignored_total", "fields", "fields of requests that nobody reads", "total"),
        Gauge("agent_calls_total", "calls", "tool calls in the answers", "total"),
        Gauge(
            "agent_calls_unreadable_total",
            "calls",
            "tool calls that cannot be read, so that the model reads an error and writes them again",
            "total",
        ),
        Gauge(
            "agent_calls_missing_total",
            "answers",
            "answers without a tool call to requests that demand one",
            "total",
        ),
    ]
)
"""Gauges of the suite."""


@dataclass
class AgentCounts:
    """Counts of one process. The fields are those of `GAUGES`, without prefix and ending.

    Example:
        >>> sorted(AgentCounts(requests=2).gauges()) == sorted(GAUGES)
        True
    """

    requests: int = 0
    repeats: int = 0
    refused: int = 0
    withdrawn: int = 0
    fields_ignored: int = 0
    calls: int = 0
    calls_unreadable: int = 0
    calls_missing: int = 0

    def gauges(self) -> dict[str, float]:
        """Return the counts under the names of their gauges."""
        return {f"agent_{name}_total": float(value) for name, value in asdict(self).items()}


HANG_UP_S = 0.1
"""Time in which a connection that a client has closed is seen to be closed."""
MISSED_S = 30.0
"""Time after which a request is withdrawn that no client waits for. Clients ask again after some 8 s at most."""
Alive = Callable[[], bool]
"""Returns whether a client still waits for its answer."""


class SessionOver(EnvError):
    """The episode has ended, and with it the session of its agent."""


class SessionGivenUp(SessionOver):
    """The episode was given up by nobody's fault: its task runs again, in a session of its own."""


class ConversationFull(EnvError):
    """A conversation has no room for an answer; a shorter one of its session has."""


class TurnDeclined(EnvError):
    """A request cannot be answered; others of its session can."""


@dataclass(eq=False)
class Asked:
    """A request and its answer to come."""

    request: ChatRequest
    """The request; without messages and tools once it is answered, because each later one repeats them."""
    number: int
    clients: list[Alive]
    """The clients that ask, more than one if the request was repeated."""
    delivered: bool = False
    """True if a client has got the answer."""
    missed_since: float | None = None
    """Monotonic time at which it was first seen that nobody waits for the answer."""
    answer: "asyncio.Future[Reply]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def missed(self) -> bool:
        """Whether no client has got the answer, and none waits for it any more."""
        return not self.delivered and not any(alive() for alive in self.clients)

    @property
    def answered(self) -> bool:
        """Whether it has an answer, and no error."""
        return self.answer.done() and self.answer.exception() is None

    def settle(self, outcome: Reply | EnvError) -> None:
        """Set the answer, or the error that its clients get. What came before stays."""
        self.request = replace(self.request, messages=[], tools=[])
        if self.answer.done():
            return
        if isinstance(outcome, EnvError):
            self.answer.set_exception(outcome)
            # The agent may be gone; then nobody reads this error.
            self.answer.exception()
        else:
            self.answer.set_result(outcome)


class AgentSession:
    """Requests of an agent, in order, and the reward that it may report.

    Args:
        name: the session's part of the URL.
        counts: what the suite counts.
    """

    def __init__(self, name: str, counts: AgentCounts) -> None:
        self.name, self._counts = name, counts
        self.key = secrets.token_urlsafe(24)
        """Secret of the session, the agent's API key."""
        self.rewards: dict[str, float] | None = None
        """Rewards that were reported over HTTP; None: none were."""
        self.turn_rewards: dict[int, dict[str, float]] = {}
        """Rewards that were reported for the answers to single requests, by the request's number."""
        self.over = False
        self.left = False
        """True if `POST /end` has ended the session."""
        self.news = asyncio.Event()
        """Set when a request has come or got its answer, and when the agent has ended the session."""
        self._waiting: deque[Asked] = deque()
        self._asked: dict[bytes, list[Asked]] = {}
        """Requests by the hash of their bytes."""
        self._count = 0

    def lets_in(self, authorization: str) -> bool:
        """Return whether an Authorization header has the session's key."""
        scheme, _, key = authorization.partition(" ")
        given = key.encode(errors="surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self.key.encode())

    async def ask(self, body: bytes, request: ChatRequest, alive: Alive, *, again: bool) -> Asked:
        """Hand a request to the episode. Return it with its answer.

        Several requests may wait at a time, as those of sub-agents. A request that comes again gets the answer of the
        first, and nothing is sampled twice. It is taken for a repetition if its bytes are those of an earlier one, and
        the client says that it asks again, or the earlier client has hung up before it got its answer.

        Args:
            alive: returns whether the client still waits.
            again: the client says that it sends the request once more.

        Raises:
            SessionOver: the episode has ended.
        """
        digest = blake2b(body, digest_size=16).digest()
        asked = self._repeated(digest, again)
        if asked is None and digest in self._asked:
            # Word that the earlier client has hung up may come behind its new request.
            await asyncio.sleep(HANG_UP_S)
            asked = self._repeated(digest, again)
        if self.over:
            raise SessionOver("this episode has ended; no further turn is sampled")
        if asked is None:
            asked = Asked(request, self._count, [alive])
            self._count += 1
            self._asked.setdefault(digest, []).append(asked)
            self._waiting.append(asked)
            self.news.set()
        else:
            asked.clients.append(alive)
            self._counts.repeats += 1
        # A client that hangs up does not end the sampling: it may ask once more.
        await asyncio.shield(asked.answer)
        return asked

    def _repeated(self, digest: bytes, again: bool) -> Asked | None:
        """Return the last request with these bytes that this one repeats."""
        known = self._asked.get(digest, [])[::-1]
        missed = [asked for asked in known if asked.missed]
        return next(iter([*missed, *(known if again else [])]), None)

    def take(self) -> list[Asked]:
        """Return the requests that nobody has taken yet, in the order in which they came."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def withdraw(self) -> list[Asked]:
        """Withdraw the requests that no client has waited for since `MISSED_S`. Return them.

        The client that sends one once more asks anew.
        """
        gone, now = [], time.monotonic()
        for digest, same in list(self._asked.items()):
            for asked in [asked for asked in same if not asked.answer.done()]:
                if not asked.missed:
                    asked.missed_since = None
                elif asked.missed_since is None:
                    asked.missed_since = now
                if asked.missed_since is not None and now - asked.missed_since >= MISSED_S:
                    gone.append(asked)
                    same.remove(asked)
                    asked.settle(TurnDeclined(f"nobody has waited for this answer for {MISSED_S:g} s"))
            if not same:
                del self._asked[digest]
        return gone

    def leave(self) -> None:
        """Note that the agent has ended the session."""
        self.left = True
        self.news.set()

    def end(self, why: SessionOver | None = None) -> None:
        """End the session: what still waits for an answer gets an error.

        Args:
            why: the error; None: that of an episode at its limits.
        """
        self.over = True
        error = why or SessionOver("the episode has ended at its limit of turns or tokens")
        for asked in [asked for same in self._asked.values() for asked in same]:
            asked.settle(error)

    def report(self, content: Any) -> None:
        """Note the rewards of `POST /reward`: ``{"value": 1.0}`` or ``{"rewards": {"exact": 1.0}}``.

        With ``"turn": ID`` they belong to the answer of that id, else to the last one.

        Raises:
            EnvError: the content is something else, or there is no such answer.
        """
        table = content if isinstance(content, dict) else {}
        rewards = rewards_of(table.get("rewards", table.get("value")))
        if table.get("turn") is None:
            self.rewards = rewards
        else:
            self.turn_rewards.setdefault(self._number(table["turn"]), {}).update(rewards)

    def _number(self, name: Any) -> int:
        """Return the number of the request that an answer's id belongs to.

        Raises:
            EnvError: the session has no such answer.
        """
        _, _, place = str(name).partition("-")
        session, _, number = place.rpartition("-")
        answered = [asked.number for same in self._asked.values() for asked in same if asked.answered]
        if session != self.name or not number.isdecimal() or int(number) not in answered:
            raise EnvError(f"turn = {name!r:.200}: this session has no answer of this id")
        return int(number)


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
    try:
        rewards = {name: float(number) for name, number in table.items()}
    except OverflowError:
        rewards = {"": math.inf}
    if not all(math.isfinite(reward) for reward in rewards.values()):
        raise EnvError(f"the agent's reward is {value!r:.200}; a reward is a finite number")
    return rewards
