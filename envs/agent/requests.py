"""Interface of an environment that asks for several answers at a time, beside `envs.base.Env.step`.

An agent whose sub-agents ask at a time is such an environment. The actor has all its requests sampled together, each
behind the conversation that it continues.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from envs.base import ChatMessage, StepResult, ToolSchema, TurnFacts


@dataclass(frozen=True)
class PolicyRequest:
    """A request for one answer of the policy."""

    number: int
    """Its number: requests are counted from 0, in the order in which the environment hands them out."""
    messages: Sequence[ChatMessage]
    """New messages, at least one."""
    after: int = -1
    """Number of the answered request whose answer they follow; -1: none, so they are the prompt of a conversation."""
    tools: Sequence[ToolSchema] = ()
    """Schemas of the tools of the conversation."""
    limit: int | None = None
    """Most tokens that the answer may have, at least 1; None: as many as the run allows."""


@dataclass(frozen=True)
class RequestNews:
    """What has happened in the environment since it was asked last."""

    new: Sequence[PolicyRequest] = ()
    withdrawn: Sequence[int] = ()
    """Numbers of requests that nobody wants an answer to any more."""
    ended: bool = False
    """Whether no further request comes, and nobody waits for answers."""


@runtime_checkable
class HasRequests(Protocol):
    """Optional methods of an `Env`. The actor then calls neither ``reset`` nor ``step``.

    Two cases are played by steps all the same: lockstep in windows, and a task that begins with a prefix or a note.
    """

    async def begin(self, data: dict[str, Any]) -> None:
        """Begin the episode, as ``reset`` does."""
        ...

    async def next_requests(self, wait_s: float | None) -> RequestNews:
        """Wait until something happens, and return it. A given answer counts, too, and may return empty news.

        The actor calls this again and again, never twice at a time. `actor.env_timeout_s` bounds each call.

        Args:
            wait_s: longest wait in seconds, after which nothing may have happened; None: no bound of its own.
        """
        ...

    def answer(self, number: int, action: str, facts: TurnFacts) -> None:
        """Give the answer to a request. It must return at once."""
        ...

    def decline(self, number: int, why: str, too_long: bool) -> None:
        """Say that a request cannot be answered; others can. It must return at once.

        Args:
            too_long: its branch would have more than `max_context_tokens`.
        """
        ...

    async def outcome(self, cut: bool) -> StepResult:
        """Return the result of the episode.

        In its ``auxiliary`` and ``earlier``, answers have the numbers of their requests.

        Args:
            cut: the actor ends the episode at a limit. Rewards, if there are any, count then, too. Otherwise the news
                have said that it has ended, and the result has ``done``.
        """
        ...


class OneAtATime(ABC):
    """Base of an environment with requests, which gives it the methods of `envs.base.Env` as well.

    By steps, requests that wait at a time are answered one after the other, in the order in which they came.
    """

    def __init__(self) -> None:
        self._queue: deque[PolicyRequest] = deque()
        self._present: PolicyRequest | None = None
        self._answered: list[int] = []
        self._turn_facts = TurnFacts(0, 0, cut=False)

    @abstractmethod
    async def begin(self, data: dict[str, Any]) -> None: ...
    @abstractmethod
    async def next_requests(self, wait_s: float | None) -> RequestNews: ...
    @abstractmethod
    def answer(self, number: int, action: str, facts: TurnFacts) -> None: ...
    @abstractmethod
    def decline(self, number: int, why: str, too_long: bool) -> None: ...
    @abstractmethod
    async def outcome(self, cut: bool) -> StepResult: ...

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """Begin the episode. Return the messages of its first request.

        Raises:
            EnvError: it ended without a request.
        """
        await self.begin(data)
        return (await self._following()).messages()

    def tool_schemas(self) -> Sequence[ToolSchema]:
        """Return the tools of the request that waits."""
        return self._present.tools if self._present is not None else []

    def turn_limit(self) -> int | None:
        """Return the most tokens that are wanted in the next answer."""
        return self._present.limit if self._present is not None else None

    def turn_facts(self, facts: TurnFacts) -> None:
        """Note the number of tokens of the turn that the next step answers with."""
        self._turn_facts = facts

    async def step(self, action: str) -> StepResult:
        """Answer the request that waits. Return the next one, or the result of the episode."""
        assert self._present is not None, "step before reset"
        self._answered.append(self._present.number)
        self.answer(self._present.number, action, self._turn_facts)
        return await self._following()

    async def refuse(self, why: str, too_long: bool) -> StepResult:
        """Decline the request that waits. Return what comes instead, as `step` does."""
        assert self._present is not None, "refuse before reset"
        self.decline(self._present.number, why, too_long)
        return await self._following()

    async def _following(self) -> StepResult:
        while True:
            # The end counts at once, whatever still waits.
            news = await self.next_requests(0.0 if self._queue else None)
            self._queue.extend(news.new)
            for request in [r for r in self._queue if r.number in news.withdrawn]:
                self._queue.remove(request)
            if news.ended or self._queue:
                break
        self._present = None if news.ended else self._queue.popleft()
        # The actor may end the episode here, for example at its last turn; then these rewards count.
        result = in_order(await self.outcome(cut=not news.ended), self._answered)
        if self._present is None:
            return result
        after = self._present.after
        return replace(
            result,
            observation=list(self._present.messages),
            after=self._answered.index(after) if after >= 0 else -1,
            tools=self._present.tools,
        )


def in_order(result: StepResult, requests: Sequence[int]) -> StepResult:
    """Return the outcome of an episode as a step's result, in which answers are counted from 0.

    Args:
        result: in which answers have the numbers of their requests.
        requests: numbers of the requests, in the order in which their answers count.

    Example:
        >>> in_order(StepResult(auxiliary=[7], earlier={4: {"tidy": 1.0}}), [4, 7])
        ... # doctest: +ELLIPSIS
        StepResult(observation=None, rewards={}, ... auxiliary=[1], marks={}, earlier={0: {'tidy': 1.0}}, hints=())
    """
    places = {number: place for place, number in enumerate(requests)}
    return replace(
        result,
        auxiliary=[places[number] for number in result.auxiliary if number in places],
        earlier={places[number]: rewards for number, rewards in result.earlier.items() if number in places},
    )
