"""An episode of suite `agent`: the agent's requests are the turns, and its code runs where it cannot hold up others."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from envs.agent.chat import ChatRequest, Reply, make_reply
from envs.agent.endpoint import Endpoint
from envs.agent.message_tree import Following, MessageTree, Trained
from envs.agent.session import (
    AgentSession,
    Asked,
    ConversationFull,
    SessionGivenUp,
    SessionOver,
    TurnDeclined,
    rewards_of,
)
from envs.base import ChatMessage, OneAtATime, PolicyRequest, RequestNews, StepResult, TurnFacts
from envs.errors import EnvError
from envs.rows.reading import DataRow

CANCEL_S = 4.2
"""Longest time that an agent may take to end once its episode is over. A program takes up to 4 s."""


class RunningAgent:
    """The user's agent at work.

    Args:
        run: the agent.
        arguments: its arguments.
    """

    def __init__(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.work = started(run, arguments)

    @property
    def over(self) -> bool:
        """Whether it has ended, or was ended."""
        return self.work.done()

    @property
    def was_ended(self) -> bool:
        """Whether it was ended before it had returned."""
        return self.work.cancelled()

    def hand_over(self) -> None:
        """Let its task belong to the present call, so that code which blocks is blamed on this call."""
        present = asyncio.current_task()
        if hasattr(present, "call") and hasattr(self.work, "call"):
            cast(Any, self.work).call = cast(Any, present).call

    def check(self) -> None:
        """Raise the error of an agent that has ended with one.

        Raises:
            CancelledError: it was ended, or has cancelled itself.
        """
        self.work.result()

    def value(self) -> Any:
        """Return what it returned; None if it was ended, or raised an error."""
        work = self.work
        return work.result() if self.over and not self.was_ended and work.exception() is None else None

    async def end(self) -> None:
        """End it, and wait until it has ended."""
        if not self.over:
            self.work.cancel()
            await asyncio.wait({self.work}, timeout=CANCEL_S)
        if self.over and not self.was_ended:
            # Its error, if there is one, came of the end.
            self.work.exception()

    async def may_end(self, seconds: float) -> None:
        """Give it time to end by itself."""
        await asyncio.wait({self.work}, timeout=seconds)


def started(run: Callable[..., Any], arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
    """Start code of the user: a coroutine function in this event loop, a plain one in a thread of its own."""
    if inspect.iscoroutinefunction(run):
        started: asyncio.Future[Any] = asyncio.ensure_future(run(*arguments))
        return started
    return asyncio.ensure_future(_awaited(_in_thread(run, arguments)))


async def _awaited(started: "asyncio.Future[Any]") -> Any:
    """Return the result of a plain function, or of the coroutine that it returned."""
    value = await started
    return await value if inspect.isawaitable(value) else value


def _in_thread(run: Callable[..., Any], arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def set_result(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, failed = None, None
        try:
            value = run(*arguments)
        except BaseException as error:
            failed = error if isinstance(error, Exception) else EnvError(f"the agent raised {error!r}")
        # The loop is closed if the actor has ended in the meantime.
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, value, failed)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return done


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
    """True if an agent that takes longer is ended and scored as it stands. Otherwise its episode fails."""
    render_anew: bool = False
    """True if each request is rendered as a whole, as a server that is not trained does it."""


class AgentEpisode(OneAtATime):
    """Runs the user's agent on one row, as an `envs.base.Env` that `envs.base.HasRequests`.

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
        super().__init__()
        self._run, self._score, self._endpoint = run, score, endpoint
        self._begin, self._solved, self._trained = begin, solved, trained
        self._session: AgentSession | None = None
        self._agent: RunningAgent | None = None
        self._open: dict[int, Asked] = {}
        """Requests that wait for their answers, by their numbers in the tree."""
        self._tree = MessageTree()
        self._row: DataRow | None = None
        self._rules, self._until = rules or AgentRules(), 0.0
        self._full: set[int] = set()
        """Requests whose conversation is too long, as the agent was told, and which it has not asked again."""
        self._settings: dict[str, str | float] = {}
        self._further: list[PolicyRequest] = []
        """Requests of our own, in which the policy reads what is wrong with its calls."""
        self._settled: dict[int, Asked] = {}
        """Requests that were answered, by their numbers in the tree."""

    async def begin(self, data: dict[str, Any]) -> None:
        """Start the agent."""
        self._row = self._begin(data)
        self._session = await self._endpoint.open()
        arguments = self._row.values, self._endpoint.url(self._session), self._session.key
        self._agent = RunningAgent(self._run, arguments)
        self._until = time.monotonic() + self._rules.timeout_s

    def open_request(self, number: int) -> ChatRequest:
        """Return a request that waits for its answer, as the agent sent it."""
        return self._open[number].request

    async def next_requests(self, wait_s: float | None) -> RequestNews:
        """Wait for the agent's next requests, or its end. Return its new requests, and those it wants no more.

        Raises:
            EnvError: the agent took too long.
            Exception: the agent's own errors.
        """
        assert self._session is not None, "next_requests before begin"
        assert self._agent is not None
        self._agent.hand_over()
        await self._wait(wait_s)
        if await self._has_ended():
            return RequestNews(ended=True)
        new = [*self._further, *(self._placed(asked) for asked in self._session.take())]
        self._further.clear()
        gone = self._session.withdraw()
        withdrawn = [number for number, asked in self._open.items() if asked in gone]
        for number in withdrawn:
            del self._open[number]
        self._endpoint.counts.withdrawn += len(withdrawn)
        return RequestNews(new, withdrawn)

    def answer(self, number: int, action: str, facts: TurnFacts) -> None:
        """Give the agent the answer to a request."""
        assert self._session is not None
        asked = self._open.pop(number, None)
        if asked is None or asked.answer.done():
            # It was withdrawn, or the session ended, while the answer was on its way.
            return
        reply = make_reply(action, asked.request, asked.number, facts)
        self._note(asked.request, reply)
        self._settled[number] = asked
        self._session.news.set()
        if reply.told:
            self._tell(number, asked, reply)
            return
        self._tree.answered(number, reply.message, asked.request.messages)
        asked.settle(reply)

    def _tell(self, number: int, asked: Asked, reply: Reply) -> None:
        """Ask the policy again, which reads what is wrong with its calls. The agent goes on waiting for its answer.

        A text that was meant for a call would be an answer to the agent, and be scored as one.
        """
        before = self._tree.messages(number)
        self._tree.answered(number, reply.told[0])
        conversation = cast(list[ChatMessage], [*before, *reply.told])
        place = self._tree.place(conversation, asked.request.tools)
        self._open[place.number] = asked
        self._further.append(self._policy_request(place, conversation, asked.request))

    def decline(self, number: int, why: str, too_long: bool) -> None:
        """Tell the agent that a request cannot be answered.

        An agent that raises an error because its conversation is too long has ended, and is scored as it stands.
        """
        assert self._session is not None
        asked = self._open.pop(number, None)
        self._endpoint.counts.refused += 1
        if asked is not None:
            self._full |= {number} if too_long else set()
            asked.settle(ConversationFull(why) if too_long else TurnDeclined(why))
        self._session.news.set()

    async def outcome(self, cut: bool) -> StepResult:
        """Return the agent's reward, if it has ended.

        Raises:
            EnvError: it returned no reward, or got no answer.
        """
        missed = [number for number, asked in self._settled.items() if asked.missed]
        auxiliary = [*self._tree.auxiliary(self._trained), *self._tree.unanswered, *missed]
        if cut:
            return StepResult(auxiliary=auxiliary, earlier=self._earlier())
        if len(missed) == len(self._tree.answers):
            wanted = "an answer of" if self._tree.placed else "asking"
            raise EnvError(f"{self._place}: the agent ended without {wanted} the model")
        rewards = await self._rewards()
        return StepResult(
            rewards=rewards,
            done=True,
            correct=self._solved(rewards),
            info={"row": self._place, **({"asked": self._settings} if self._settings else {})},
            auxiliary=auxiliary,
            earlier=self._earlier(),
        )

    def give_up(self) -> None:
        """Tell the agent that nobody is at fault, and that it may come again: its task runs once more."""
        if self._session is not None:
            why = SessionGivenUp("this episode was given up, by nobody's fault; its task runs again")
            self._endpoint.close_session(self._session, why)

    async def close(self) -> None:
        """End the session and the agent. An agent in a thread ends with its next request, which gets an error."""
        if self._session is not None:
            self._endpoint.close_session(self._session)
        if self._agent is not None:
            if self._open:
                await self._agent.may_end(PARTING_S)
            await self._agent.end()

    def _placed(self, asked: Asked) -> PolicyRequest:
        """Return a request as the actor gets it."""
        request = asked.request
        place = self._tree.place(request.messages, request.tools)
        self._full = {declined for declined in self._full if not self._tree.resumes(place.number, declined)}
        self._open[place.number] = asked
        return self._policy_request(place, request.messages, request)

    def _policy_request(
        self, place: Following[ChatMessage], messages: Sequence[ChatMessage], request: ChatRequest
    ) -> PolicyRequest:
        if self._rules.render_anew:
            # The actor finds the answers whose tokens the new prompt has.
            return PolicyRequest(place.number, messages, tools=request.tools, limit=request.max_tokens)
        return PolicyRequest(place.number, place.new, place.after, request.tools, request.max_tokens)

    def _note(self, request: ChatRequest, reply: Reply) -> None:
        """Count an answer, and note what its request says about sampling."""
        counts, calls = self._endpoint.counts, len(reply.message.get("tool_calls", ()))
        counts.calls_unreadable += reply.unreadable
        if reply.told:
            return
        counts.requests += 1
        counts.calls += calls
        counts.calls_missing += request.demands_call and not calls
        self._settings |= request.settings

    async def _wait(self, wait_s: float | None) -> None:
        """Wait until there is news of the session, the agent has ended, or its time is over; at most ``wait_s``."""
        assert self._session is not None
        assert self._agent is not None
        left = max(0.0, self._until - time.monotonic()) if self._rules.timeout_s else None
        limits = [limit for limit in (wait_s, left) if limit is not None]
        news = asyncio.ensure_future(self._session.news.wait())
        try:
            await asyncio.wait(
                {news, self._agent.work},
                timeout=min(limits, default=None),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            news.cancel()
        self._session.news.clear()

    async def _has_ended(self) -> bool:
        """Return whether the agent has ended, and raise its error. One whose time is over is ended.

        Raises:
            EnvError: its time is over, and such an episode fails.
        """
        assert self._session is not None
        assert self._agent is not None
        if self._session.left:
            # It may still return what it wants to say.
            await self._agent.may_end(LEAVE_S)
            await self._agent.end()
            return True
        if self._agent.over:
            # Nobody waits for the answers to requests that it has left behind.
            if not self._full or self._agent.was_ended:
                self._agent.check()
            return True
        if not self._rules.timeout_s or time.monotonic() < self._until:
            return False
        self._endpoint.close_session(self._session, SessionOver("the agent's time is over"))
        await self._agent.end()
        if not self._rules.score_late:
            raise EnvError(
                f"{self._place}: the agent took longer than params.timeout_s = {self._rules.timeout_s:g}"
            )
        return True

    async def _rewards(self) -> dict[str, float]:
        assert self._session is not None
        assert self._agent is not None
        assert self._row is not None
        value = self._agent.value()
        if self._score is not None:
            # What the agent has left behind in its session must not be sampled while it is scored.
            self._endpoint.close_session(self._session)
            return rewards_of(await started(self._score, (self._row.values, value)))
        if self._session.rewards is not None:
            return self._session.rewards
        if value is None or isinstance(value, str):
            if self._session.turn_rewards:
                return {}
            if self._full and not self._agent.was_ended:
                # It has ended because its conversation was too long, and nobody says what that is worth.
                self._agent.check()
            raise EnvError(f"{self._place}: the agent returned no reward, and posted none; name a `score`")
        return rewards_of(value)

    def _earlier(self) -> dict[int, dict[str, float]]:
        """Return the rewards that were reported for single answers, by the numbers of their requests."""
        assert self._session is not None
        # What the agent has got is the last of the answers to a request; before it, calls could not be read.
        last = {asked.number: number for number, asked in self._settled.items()}
        found = self._session.turn_rewards
        return {number: found[asked] for asked, number in last.items() if asked in found}

    @property
    def _place(self) -> str:
        return self._row.place if self._row is not None else ""
