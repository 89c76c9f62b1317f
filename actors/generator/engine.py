"""Interface of an inference engine for a generator. `vllm_engine` and `http_engine` implement it."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.sampled import Sampled
from protocol.messages.fields import KvPolicy
from protocol.weights.format import Manifest


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it. ``id`` is unique among the engine's running requests."""

    id: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[int]
    routes_from: int | None = None
    """Position in the prompt from which on the experts of the tokens are wanted; None: of no token."""


class SamplingEngine(Protocol):
    """Engine that continues token ids, reports log-probabilities and versions, and takes new weights."""

    kv: KvPolicy
    full_step_s: float
    """Seconds that the largest step took at the start; 0 if it was not measured. See `actors.generator.pace`."""
    asleep: bool
    """Whether the engine has given its GPU to the learner for now, see `actors.generator.sleeping`."""
    frozen: str
    """Reason why this engine never takes new weights; "" if it takes them."""

    @property
    def version(self) -> int:
        """Policy version that samples now."""

    @property
    def steps(self) -> int:
        """Number of steps that the engine has made: it grows whenever prompt tokens are computed or tokens
        are sampled."""

    def generate(self, request: Request) -> AsyncIterator[Sampled]:
        """Yield the tokens of one request as they come. The last item has a finish reason.

        Raises:
            RequestRefused: the request is at fault.
            EngineFailed: the engine is at fault.
        """

    async def abort(self, request_id: str) -> None:
        """End a request. Its iterator yields the remaining tokens, with finish reason "abort"."""

    def awake(self) -> AbstractAsyncContextManager[None]:
        """Keep the engine awake while the context lasts. If it sleeps, wait until it may wake."""

    async def apply_weights(self, manifest: Manifest, data: Path) -> float:
        """Replace the weights by the tensors of a *verified* file, in the middle of running requests.

        Returns:
            Seconds for which sampling stood still.

        Raises:
            UpdateRefused: the engine is unchanged.
            EngineFailed: the update failed halfway, so the engine's state is unknown.
        """

    def health(self) -> str:
        """Return what is wrong with the engine, or "" when it works."""

    def gauges(self) -> dict[str, float]:
        """Return the engine's own gauges since the last call, for TensorBoard; empty if it has none."""

    async def close(self) -> None:
        """End the engine and its processes."""


class AlwaysAwake:
    """The part of `SamplingEngine` that says that an engine never sleeps."""

    asleep = False

    def awake(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
