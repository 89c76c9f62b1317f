"""Interfaces of an environment: a suite, an episode that steps, and one that asks for several answers at a time."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeGuard, runtime_checkable

Split = Literal["train", "heldout"]


class ChatMessage(TypedDict):
    """One message of a conversation; role is "system", "user", "assistant" or "tool".

    The optional keys are those of OpenAI's chat format. An assistant message may list ``tool_calls``. A tool
    message may have the ``tool_call_id`` and the ``name`` of the call that it answers.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


ToolSchema = dict[str, Any]
"""Description of a tool as chat templates take it: ``{"type": "function", "function": {"name": ..., ...}}``."""


@dataclass(frozen=True)
class StepResult:
    """Answer of an environment to one action.

    Attributes:
        observation: message or messages appended to the conversation; None or empty when the episode is over.
            Several messages are rendered together, for example all results of one turn's tool calls.
        rewards: finite rewards of this turn, by name.
        done: whether the episode is over.
        correct: whether the task was solved exactly, for evaluation. It is set only at the end.
        info: further data. The trajectory records only the info of the last step.
        after: the answer that the observation follows, counted from 0, if that is not the last one; -1: none, so the
            messages are the whole prompt of a new conversation. The trajectory gets a branch. None: the last answer.
        tools: schemas of the tools of a conversation that begins with -1; None: those of the first one.
        auxiliary: answers, counted from 0, that are not to be trained, as far as is known by now. What counts is the
            result of the last step.
        marks: facts about this turn that a training method needs, by name, each a text of at most 256 characters or a
            finite number. "anchor" is the state that the action was taken in, equal for equal states of one task;
            "calls" is the number of tools that the action called.
        earlier: finite rewards of earlier turns, by the number of the answer and by name. They count only at the end.
        hints: texts that help to solve the task, from the weakest to the strongest, or one text: a solution, of which
            a beginning is a hint. They do not depend on the action. The learner reads those of the last step, if a
            method gives hints to tasks that the policy cannot solve.
        answer: what was found in the model's text and compared, and what it should have been, for people: samples show
            both. None: the environment does not know. The trajectory records those of the last step.
        target: see `answer`.
    """

    observation: ChatMessage | Sequence[ChatMessage] | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    done: bool = False
    correct: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)
    after: int | None = None
    tools: Sequence["ToolSchema"] | None = None
    auxiliary: Sequence[int] = ()
    marks: dict[str, str | float] = field(default_factory=dict)
    earlier: dict[int, dict[str, float]] = field(default_factory=dict)
    hints: Sequence[str] = ()
    answer: str | None = None
    target: str | None = None

    def messages(self) -> list[ChatMessage]:
        """Return the observation as a list of messages, empty if there is none.

        Example:
            >>> StepResult(observation={"role": "tool", "content": "7"}).messages()
            [{'role': 'tool', 'content': '7'}]
        """
        if self.observation is None:
            return []
        return [self.observation] if isinstance(self.observation, Mapping) else list(self.observation)


class Env(Protocol):
    """Environment of one episode.

    The functions may also be plain ones (``def``). The actor runs these in threads, so they may block.
    """

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """Return the first observation. ``data`` is usually the task's ``{"index": int, "split": Split}``."""
        ...

    async def step(self, action: str) -> StepResult:
        """Answer one action: the text of one assistant turn, without its end token."""
        ...

    async def close(self) -> None:
        """Free the resources of the episode. The actor calls this once, also after an error."""
        ...


class Suite(Protocol):
    """A family of tasks."""

    def episode(self) -> Env: ...

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a solved episode as a conversation, for warm starts. Blocks.

        The assistant turns are the solution.

        Raises:
            LookupError: the library gives no solution for this task.
        """
        ...

    async def close(self) -> None:
        """Free the resources of the suite, such as scorer processes and connections."""
        ...


@runtime_checkable
class HasTools(Protocol):
    """Optional method of an `Env`, in addition to the methods of `Env`.

    The action of such an environment keeps its special tokens as text, because the marks of tool calls may be
    special tokens. Only the end token is left out. Without any schema, they are left out as for every environment.
    """

    def tool_schemas(self) -> Sequence[ToolSchema]:
        """Return the schemas of the tools for the chat template. The actor calls this once, after ``reset``."""
        ...


@dataclass(frozen=True)
class TurnFacts:
    """Facts of one sampled turn."""

    prompt_tokens: int
    """Tokens of the conversation in front of the turn."""
    answer_tokens: int
    """Tokens of the turn, with its end token if there is one."""
    cut: bool
    """True if the turn ended at a limit of tokens."""


@runtime_checkable
class HasTurnFacts(Protocol):
    """Optional method of an `Env`, in addition to the methods of `Env`."""

    def turn_facts(self, facts: TurnFacts) -> None:
        """Note the facts of a turn. The actor calls this before each ``step``."""
        ...


@runtime_checkable
class HasTurnLimit(Protocol):
    """Optional method of an `Env`, in addition to the methods of `Env`."""

    def turn_limit(self) -> int | None:
        """Return the most tokens that the next answer may have, at least 1; None: as many as the run allows.

        The bounds of the run hold, too. The actor calls this before each turn.
        """
        ...


@runtime_checkable
class HasRefusal(Protocol):
    """Optional method of an `Env`, in addition to the methods of `Env`."""

    async def refuse(self, why: str, too_long: bool) -> StepResult:
        """Tell whoever sent the last messages that they cannot be rendered. Return what comes instead, as `step` does.

        Without this method, such messages fail the episode.

        Args:
            too_long: they can be rendered, but their branch would have more than `max_context_tokens`.
        """
        ...


def can_refuse(env: Env) -> TypeGuard[HasRefusal]:
    """Return whether an environment can refuse messages.

    One that stands for another, as for one on a server, has the method always. It says by a ``refuses`` that is false
    that the other one has not.

    Example:
        >>> class Proxy:
        ...     refuses = False
        ...     async def refuse(self, why, too_long): ...
        >>> can_refuse(Proxy())
        False
    """
    return isinstance(env, HasRefusal) and getattr(env, "refuses", True) is not False


@runtime_checkable
class HasGiveUp(Protocol):
    """Optional method of an `Env`, in addition to the methods of `Env`."""

    def give_up(self) -> None:
        """Note that the episode ends by nobody's fault, and that its task runs again. ``close`` follows."""
        ...


@runtime_checkable
class HasGauges(Protocol):
    """Optional method of a suite, in addition to the methods of `Suite`."""

    def gauges(self) -> Mapping[str, float]:
        """Return numbers of the suite's own, for TensorBoard and `/status`, which show them as ``env/NAME``.

        A name that ends in ``_total`` is a counter, which is summed over actors. Other numbers are averaged.
        """
        ...


class CodeCaller(Protocol):
    """Runs functions of environments, each with a deadline, for those who must not run them themselves.

    `actors.environments` has the two implementations.
    """

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout_s: float,
        on_loop: bool = False,
    ) -> Any: ...


@dataclass(frozen=True)
class SuiteFacts:
    """Facts of a suite that Offbeat checks settings against, before anything starts."""

    heldout_tasks: int | None = None
    """Number of held-out tasks; None: there is no end to them."""
    reward_names: tuple[str, ...] | None = None
    """Names of all rewards; None: they are not known before they occur."""
    longest_tasks: tuple[tuple[Split, int, str], ...] = ()
    """Split and index of the tasks with the longest first prompts, each with the place where a person finds it."""
    remarks: tuple[str, ...] = ()
    """Sentences for a person on what is allowed but probably not meant."""
    heldout_by_env: Mapping[str, int | None] = field(default_factory=dict)
    """The same as ``heldout_tasks`` for each of several environments, by its label."""
    mark_names: tuple[str, ...] | None = None
    """Names of the marks that every turn has; None: they are not known before they occur."""
    hints: bool | None = None
    """True if every task has `StepResult.hints`; None: that is not known before an episode ends."""
    own_prompts: bool = False
    """True if the environment writes whole prompts after the first one, as an agent does, so that a note which the
    actor puts behind the first prompt would be missing in the next."""
    fixed_ports: tuple[int, ...] = ()
    """Ports that every process with this suite listens on, so that a host has room for one of them only."""
    train_tasks: int | None = None
    """Number of training tasks; greater numbers are these tasks again. None: they have no known end."""


@runtime_checkable
class HasFacts(Protocol):
    """Optional method of a suite, in addition to the methods of `Suite`."""

    def facts(self) -> SuiteFacts:
        """Return the facts. `offbeat check` and `offbeat train` call this once, before any role starts."""
        ...


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
    """Events in the environment since it was asked last."""

    new: Sequence[PolicyRequest] = ()
    withdrawn: Sequence[int] = ()
    """Numbers of requests that nobody wants an answer to any more."""
    ended: bool = False
    """True if no further request comes, and nobody waits for answers."""


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
        StepResult(observation=None, rewards={}, ... auxiliary=[1], marks={}, earlier={0: {'tidy': 1.0}}, hints=()...)
    """
    places = {number: place for place, number in enumerate(requests)}
    return replace(
        result,
        auxiliary=[places[number] for number in result.auxiliary if number in places],
        earlier={places[number]: rewards for number, rewards in result.earlier.items() if number in places},
    )
