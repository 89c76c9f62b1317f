"""An episode of suite `agent`: the agent's requests are the turns.

The policy answers a request, and what the agent sends next is the observation. So what an agent asks is a trajectory
like any other: prompts are rendered once, and the tokens of an answer stay as they were sampled. A request that does
not continue the last answer begins a branch of the trajectory.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

from envs.agent.chat import ChatRequest, make_reply
from envs.agent.endpoint import Endpoint
from envs.agent.message_tree import MessageTree, Trained
from envs.agent.session import AgentSession, Asked, rewards_of
from envs.base import ChatMessage, StepResult, ToolSchema, TurnFacts
from envs.errors import EnvError
from envs.rows.reading import DataRow

CANCEL_S = 4.5
"""Longest time that an agent may take to end once its episode is over. A program takes up to 4 s."""
AgentFunction = Callable[[dict[str, Any], str, str], Any]
"""The user's agent: takes a row, a base URL and an API key, and returns its reward. It may be asynchronous."""


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
    """

    def __init__(
        self,
        run: AgentFunction,
        score: Callable[..., Any] | None,
        endpoint: Endpoint,
        begin: Callable[[dict[str, Any]], DataRow],
        solved: Callable[[dict[str, float]], bool | None],
        trained: Trained = "tools",
    ) -> None:
        self._run, self._score, self._endpoint = run, score, endpoint
        self._begin, self._solved, self._trained = begin, solved, trained
        self._session: AgentSession | None = None
        self._agent: asyncio.Future[Any] | None = None
        self._asked: Asked | None = None
        self._tree = MessageTree()
        self._row: DataRow | None = None
        self._facts = TurnFacts(0, 0, cut=False)

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """Start the agent. Return the messages of its first request.

        Raises:
            EnvError: it ended without a request.
        """
        self._row = self._begin(data)
        self._session = await self._endpoint.open()
        arguments = self._row.values, self._endpoint.url(self._session), self._session.key
        self._agent = _started(self._run, arguments)
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
            EnvError: the agent returned no reward.
            Exception: the agent's own errors.
        """
        asked = self._asked
        assert asked is not None, "step before reset"
        self._hand_over()
        reply = make_reply(action, asked.request, asked.number, self._facts)
        self._tree.answered(reply.message)
        asked.answer.set_result(reply)
        following = await self._next()
        auxiliary = self._tree.auxiliary(self._trained)
        if following is not None:
            request = following.request
            place = self._tree.place(request.messages, request.tools)
            return StepResult(place.new, after=place.after, tools=request.tools, auxiliary=auxiliary)
        rewards = await self._rewards()
        correct = self._solved(rewards)
        return StepResult(
            rewards=rewards, done=True, correct=correct, info={"row": self._place}, auxiliary=auxiliary
        )

    async def close(self) -> None:
        """End the session and the agent. An agent in a thread ends with its next request, which gets an error."""
        if self._session is not None:
            self._endpoint.close_session(self._session)
        if self._agent is not None and not self._agent.done():
            self._agent.cancel()
            await asyncio.wait({self._agent}, timeout=CANCEL_S)

    def _hand_over(self) -> None:
        """Let the agent's task belong to the present call, so that code which blocks is blamed on it."""
        present = asyncio.current_task()
        if hasattr(present, "call") and hasattr(self._agent, "call"):
            cast(Any, self._agent).call = cast(Any, present).call

    async def _next(self) -> Asked | None:
        """Wait for the agent's next request. Return None if the agent has ended, and raise its error."""
        assert self._session is not None
        assert self._agent is not None
        request = asyncio.ensure_future(self._session.next_request())
        try:
            await asyncio.wait({request, self._agent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not request.done():
                request.cancel()
        if self._agent.done():
            # Nobody waits for the answers to requests that it has left behind.
            self._asked = None
            self._agent.result()
            return None
        self._asked = request.result()
        return self._asked

    async def _rewards(self) -> dict[str, float]:
        assert self._session is not None
        assert self._agent is not None
        assert self._row is not None
        value = self._agent.result()
        if self._score is not None:
            # What the agent has left behind in its session must not be sampled while it is scored.
            self._endpoint.close_session(self._session)
            return rewards_of(await _started(self._score, (self._row.values, value)))
        if self._session.rewards is not None:
            return self._session.rewards
        if value is None or isinstance(value, str):
            raise EnvError(f"{self._place}: the agent returned no reward, and posted none; name a `score`")
        return rewards_of(value)

    @property
    def _place(self) -> str:
        return self._row.place if self._row is not None else ""


def _started(run: Callable[..., Any], arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
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
