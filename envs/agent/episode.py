"""An episode of suite `agent`: the agent's requests are the turns.

The policy answers a request, and what the agent sends next is the observation. So what an agent asks is a trajectory
like any other: prompts are rendered once, and the tokens of an answer stay as they were sampled. A request that does
not continue the last answer begins a branch of the trajectory.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from envs.agent.chat import ChatRequest, Reply, make_reply
from envs.agent.endpoint import Endpoint
from envs.agent.message_tree import Following, MessageTree, Trained
from envs.agent.running import started
from envs.agent.session import (
    AgentSession,
    Asked,
    ConversationFull,
    SessionGivenUp,
    SessionOver,
    TurnDeclined,
    rewards_of,
)
from envs.base import ChatMessage, StepResult, ToolSchema, TurnFacts
from envs.errors import EnvError
from envs.rows.reading import DataRow

CANCEL_S = 4.2
"""Longest time that an agent may take to end once its episode is over. A program takes up to 4 s."""
PARTING_S = 0.3
"""Time in which an agent whose request waits may hear why its episode ends."""
LEAVE_S = 2.0
"""Time in which an agent may end by itself once it has ended its session."""
AgentFunction = Callable[[dict[str, Any], str, str], Any]
"""The user's agent: takes a row, a base URL and an API key, and returns its reward. It may be asynchronous."""


@dataclass(frozen=True)
class AgentRules:
    """How an agent is run."""

    timeout_s: float = 0.0
    """Longest time from the agent's start to its end, in seconds; 0: no bound of its own."""
    score_late: bool = False
    """Whether an agent that takes longer is ended and scored as it stands. Otherwise its episode fails."""
    render_anew: bool = False
    """Whether each request is rendered as a whole, as a server that is not trained does it."""


class AgentEpisode:
    """Runs the user's agent on one row, as an `envs.base.Env`.

    Args:
        run: the agent.
        score: scores the episode from the row and what the agent returned, in a thread or as a coroutine; None: the
            agent returns its reward.
        endpoint: the server that it speaks to.
        begin: returns the row of a task.
        solved: returns whether rewards count as correct.
        trained: which answers are trained, see `MessageTree.auxiliary`.
        rules: how the agent is run.
    """

    def __init__(
        self,
        run: AgentFunction,
        score: Callable[..., Any] | None,
        endpoint: Endpoint,
        begin: Callable[[dict[str, Any]], DataRow],
        solved: Callable[[dict[str, float]], bool | None],
        trained: Trained = "tools",
        rules: AgentRules | None = None,
    ) -> None:
        self._run, self._score, self._endpoint = run, score, endpoint
        self._begin, self._solved, self._trained = begin, solved, trained
        self._session: AgentSession | None = None
        self._agent: asyncio.Future[Any] | None = None
        self._asked: Asked | None = None
        self._tree = MessageTree()
        self._row: DataRow | None = None
        self._facts = TurnFacts(0, 0, cut=False)
        self._rules, self._until = rules or AgentRules(), 0.0
        self._full = False
        """Whether the agent was told that its conversation is too long, and has not asked again."""
        self._settings: dict[str, str | float] = {}
        self._answers: dict[int, int] = {}
        """Number in the tree of the answer to each request."""

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """Start the agent. Return the messages of its first request.

        Raises:
            EnvError: it ended without a request.
        """
        self._row = self._begin(data)
        self._session = await self._endpoint.open()
        arguments = self._row.values, self._endpoint.url(self._session), self._session.key
        self._agent = started(self._run, arguments)
        self._until = time.monotonic() + self._rules.timeout_s
        if (asked := await self._next()) is None:
            raise EnvError(f"{self._row.place}: the agent ended without asking the model")
        self._tree.place(asked.request.messages, asked.request.tools)
        return asked.request.messages

    @property
    def request(self) -> ChatRequest | None:
        """The request that waits for an answer."""
        return self._asked.request if self._asked is not None else None

    def tool_schemas(self) -> list[ToolSchema]:
        """Return the tools of the agent's first request."""
        return self._asked.request.tools if self._asked is not None else []

    def turn_limit(self) -> int | None:
        """Return the most tokens that the agent wants in the next answer."""
        return self._asked.request.max_tokens if self._asked is not None else None

    def turn_facts(self, facts: TurnFacts) -> None:
        """Note the number of tokens of the turn that the next step answers with."""
        self._facts = facts

    async def step(self, action: str) -> StepResult:
        """Give the agent its answer. Return what it sends next, or its reward if it has ended.

        Raises:
            EnvError: the agent returned no reward, or took too long.
            Exception: the agent's own errors.
        """
        asked = self._asked
        assert asked is not None, "step before reset"
        self._hand_over()
        reply = make_reply(action, asked.request, asked.number, self._facts)
        self._note(asked.request, reply)
        self._answers[asked.number] = len(self._tree)
        self._tree.answered(reply.message)
        asked.settle(reply)
        return await self._following()

    async def refuse(self, why: str, too_long: bool) -> StepResult:
        """Tell the agent that its request cannot be answered. Return what it sends instead, as `step` does.

        An agent that raises an error because its conversation is too long has ended, and is scored as it stands.
        """
        assert self._asked is not None, "refuse before reset"
        self._hand_over()
        self._endpoint.counts.refused += 1
        self._full = too_long
        self._asked.settle(ConversationFull(why) if too_long else TurnDeclined(why))
        return await self._following()

    def give_up(self) -> None:
        """Tell the agent that nobody is at fault, and that it may come again: its task runs once more."""
        if self._session is not None:
            why = SessionGivenUp("this episode was given up, by nobody's fault; its task runs again")
            self._endpoint.close_session(self._session, why)

    async def close(self) -> None:
        """End the session and the agent. An agent in a thread ends with its next request, which gets an error."""
        if self._session is not None:
            self._endpoint.close_session(self._session)
        if self._asked is not None and self._agent is not None:
            await asyncio.wait({self._agent}, timeout=PARTING_S)
        await self._end_agent()

    def _hand_over(self) -> None:
        """Let the agent's task belong to the present call, so that code which blocks is blamed on it."""
        present = asyncio.current_task()
        if hasattr(present, "call") and hasattr(self._agent, "call"):
            cast(Any, self._agent).call = cast(Any, present).call

    def _note(self, request: ChatRequest, reply: Reply) -> None:
        """Count an answer, and note what its request says about sampling."""
        counts, calls = self._endpoint.counts, len(reply.message.get("tool_calls", ()))
        counts.requests += 1
        counts.calls += calls
        counts.calls_unreadable += reply.unreadable
        counts.calls_missing += request.demands_call and not calls
        self._settings |= request.settings

    async def _following(self) -> StepResult:
        """Return what the agent sends next, or its reward if it has ended."""
        following = await self._next()
        auxiliary = self._tree.auxiliary(self._trained)
        if following is not None:
            request = following.request
            place = self._tree.place(request.messages, request.tools)
            if self._rules.render_anew:
                # The actor finds the answers whose tokens the new prompt has.
                place = Following(-1, request.messages)
            # The actor may end the episode here, for example at its last turn; then these rewards count.
            earlier = self._earlier()
            return StepResult(
                place.new, after=place.after, tools=request.tools, auxiliary=auxiliary, earlier=earlier
            )
        if not len(self._tree):
            raise EnvError(f"{self._place}: the agent ended without an answer of the model")
        rewards = await self._rewards()
        return StepResult(
            rewards=rewards,
            done=True,
            correct=self._solved(rewards),
            info={"row": self._place, **({"asked": self._settings} if self._settings else {})},
            auxiliary=auxiliary,
            earlier=self._earlier(),
        )

    async def _next(self) -> Asked | None:
        """Wait for the agent's next request. Return None if the agent has ended, and raise its error."""
        assert self._session is not None
        assert self._agent is not None
        request = asyncio.ensure_future(self._session.next_request())
        left = asyncio.ensure_future(self._session.left.wait())
        try:
            await asyncio.wait(
                {request, self._agent, left}, timeout=self._time_left(), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for waiting in (request, left):
                waiting.cancel()
        self._asked = None
        if left.done():
            # It may still return what it wants to say.
            await asyncio.wait({self._agent}, timeout=LEAVE_S)
            await self._end_agent()
            return None
        if self._agent.done():
            # Nobody waits for the answers to requests that it has left behind.
            if not self._full or self._agent.cancelled():
                self._agent.result()
            return None
        if not request.done():
            await self._end_late()
            return None
        self._asked, self._full = request.result(), False
        return self._asked

    def _time_left(self) -> float | None:
        return max(0.0, self._until - time.monotonic()) if self._rules.timeout_s else None

    async def _end_late(self) -> None:
        """End an agent whose time is over.

        Raises:
            EnvError: such an episode fails.
        """
        assert self._session is not None
        self._endpoint.close_session(self._session, SessionOver("the agent's time is over"))
        await self._end_agent()
        if not self._rules.score_late:
            raise EnvError(
                f"{self._place}: the agent took longer than params.timeout_s = {self._rules.timeout_s:g}"
            )

    async def _end_agent(self) -> None:
        if self._agent is not None and not self._agent.done():
            self._agent.cancel()
            await asyncio.wait({self._agent}, timeout=CANCEL_S)
        if self._agent is not None and self._agent.done() and not self._agent.cancelled():
            # Its error, if there is one, came of the end.
            self._agent.exception()

    async def _rewards(self) -> dict[str, float]:
        assert self._session is not None
        assert self._row is not None
        value = self._value()
        if self._score is not None:
            # What the agent has left behind in its session must not be sampled while it is scored.
            self._endpoint.close_session(self._session)
            return rewards_of(await started(self._score, (self._row.values, value)))
        if self._session.rewards is not None:
            return self._session.rewards
        if value is None or isinstance(value, str):
            if self._session.turn_rewards:
                return {}
            if self._full and self._agent is not None and not self._agent.cancelled():
                # It has ended because its conversation was too long, and nobody says what that is worth.
                self._agent.result()
            raise EnvError(f"{self._place}: the agent returned no reward, and posted none; name a `score`")
        return rewards_of(value)

    def _value(self) -> Any:
        """Return what the agent returned; None if it was ended."""
        agent = self._agent
        ended = agent is None or not agent.done() or agent.cancelled() or agent.exception() is not None
        return None if ended or agent is None else agent.result()

    def _earlier(self) -> dict[int, dict[str, float]]:
        """Return the rewards that were reported for single answers."""
        assert self._session is not None
        found = self._session.turn_rewards.items()
        return {self._answers[number]: rewards for number, rewards in found if number in self._answers}

    @property
    def _place(self) -> str:
        return self._row.place if self._row is not None else ""
