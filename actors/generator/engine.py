"""What a generator asks of an inference engine; `vllm_engine` and `http_engine` fulfil it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.sampled import Sampled
from protocol.messages import KvPolicy
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


class SamplingEngine(Protocol):
    """Token ids in; token ids, log-probabilities and versions out; weights replaced in between."""

    kv: KvPolicy

    @property
    def version(self) -> int:
        """Policy version that samples now."""

    def generate(self, request: Request) -> AsyncIterator[Sampled]:
        """Tokens of one request as they come; the last item has a finish reason.

        Raises:
            RequestRefused: the request is at fault. EngineFailed: the engine is.
        """

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields what is left with finish reason "abort"."""

    async def apply_weights(self, manifest: Manifest, data: Path) -> float:
        """Replace the weights by those of a *verified* file, in the middle of running requests.

        Returns:
            Seconds for which sampling stood still.

        Raises:
            UpdateRefused: nothing was touched. EngineFailed: something was, and the outcome is unknown.
        """

    def health(self) -> str:
        """Empty when the engine is well, else what is wrong."""

    def gauges(self) -> dict[str, float]:
        """Numbers of its own since they were last asked for, for TensorBoard; empty if it knows none."""

    async def close(self) -> None:
        """End the engine and its processes."""
