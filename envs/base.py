"""What an environment is.

A `Suite` is made once per process from the run file and makes single-use `Env` objects, one an episode: there
is no second reset, hence no state that leaks from one episode into the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

Split = Literal["train", "heldout"]


class ChatMessage(TypedDict):
    """One message of a conversation; role is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


@dataclass(frozen=True)
class StepResult:
    """Answer to one action.

    ``observation`` is appended to the conversation (None or empty when the episode is over); ``rewards`` are
    for this turn, by name, each finite; ``done`` ends the episode; ``correct`` (only at the end) says whether
    the task was solved exactly, for evaluation.
    """

    observation: ChatMessage | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    done: bool = False
    correct: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode."""

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """First observation. ``data`` is the task's, usually ``{"index": int, "split": Split}``."""
        ...

    async def step(self, action: str) -> StepResult:
        """Take the text of one assistant turn (without its end token)."""
        ...

    async def close(self) -> None:
        """Free what the episode holds; called once, also after an error."""
        ...


class Suite(Protocol):
    """A family of tasks."""

    def episode(self) -> Env: ...

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """A solved episode as a conversation (assistant turns are the solution); blocking. For warm starts.

        Raises:
            LookupError: the library gives no solution for this task.
        """
        ...

    async def close(self) -> None:
        """Free what the suite holds (scorer processes, connections)."""
        ...


@runtime_checkable
class HasGauges(Protocol):
    """What a suite may have beside the methods of `Suite`."""

    def gauges(self) -> Mapping[str, float]:
        """Return numbers of the suite's own, for TensorBoard and `/status`, which show them as ``env/NAME``.

        A name that ends in ``_total`` is a counter, added up over actors; other numbers are averaged.
        """
        ...
