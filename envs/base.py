"""Interfaces of an environment.

Each process makes one `Suite` from the run file. The suite makes a new `Env` for each episode, which is reset
only once, so no state leaks from one episode into the next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Whether the turn ended at a limit of tokens."""


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
    """Whether every task has `StepResult.hints`; None: that is not known before an episode ends."""
    own_prompts: bool = False
    """Whether the environment writes whole prompts after the first one, as an agent does, so that a note which the
    actor puts behind the first prompt would be missing in the next."""
    fixed_ports: tuple[int, ...] = ()
    """Ports that every process with this suite listens on, so that a host has room for one of them only."""


@runtime_checkable
class HasFacts(Protocol):
    """Optional method of a suite, in addition to the methods of `Suite`."""

    def facts(self) -> SuiteFacts:
        """Return the facts. `offbeat check` and `offbeat train` call this once, before any role starts."""
        ...
