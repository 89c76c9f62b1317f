"""Interface of an inference engine, the facts of its model, and an engine that sleeps while the learner has its GPU.

`http_engine` and `vllm_engine` implement the interface.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.errors import EngineFailed
from actors.sampled import Sampled, nothing
from protocol.errors import WeightsError
from protocol.messages.fields import KvPolicy
from protocol.processes import LOOK_S, GpuLock
from protocol.weights.format import Manifest, replaced_shapes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """Vocabulary size, end-of-sequence ids, and ``name -> (dtype, shape)`` of every tensor that a version
    replaces."""

    vocab_size: int
    eos_ids: list[int]
    shapes: dict[str, tuple[str, tuple[int, ...]]]


def read_model_facts(folder: Path) -> ModelFacts:
    """Return the facts of the model in ``folder``.

    Raises:
        FileNotFoundError: there is no config.json. The message says what to do.
        WeightsError: the vocabulary size or the tensors are missing, or quantised. The message says what to do.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; give a Hugging Face model folder")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if "vocab_size" not in text:
        raise WeightsError(f"{folder}/config.json: no vocab_size; is this a causal language model?")
    return ModelFacts(int(text["vocab_size"]), _eos_ids(folder, text), replaced_shapes(folder))


def _eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    # Several files may give it. The one meant for generation comes first, as in transformers.
    for eos in (
        _read_json_object(folder / "generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
    ):
        if eos is not None:
            return [int(i) for i in (eos if isinstance(eos, list) else [eos])]
    token = _read_json_object(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read_json_object(folder / "tokenizer.json").get("added_tokens", [])
    return [int(entry["id"]) for entry in added if text is not None and entry["content"] == text]


def _read_json_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


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
    """Seconds that the largest step took at the start; 0 if it was not measured. See `Pace`."""
    asleep: bool
    """True if the engine has given its GPU to the learner for now, see `SleepingEngine`."""
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


class VersionedEngine(AlwaysAwake):
    """The part of `SamplingEngine` that knows the version in service, and whether the engine can be trusted.

    Requests wait for `_open`, which is cleared while weights change.
    """

    def __init__(self) -> None:
        self._version, self._failed = 0, ""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def version(self) -> int:
        return self._version

    def health(self) -> str:
        return self._failed

    @contextmanager
    def _replacing_weights(self, version: int) -> Iterator[None]:
        """Take a version into service, unless the context fails.

        A model that is half replaced samples no more: `_open` stays cleared, and the engine is lost.
        """
        try:
            yield
        except asyncio.CancelledError as error:
            # This process is ending.
            self._fail("weight update", error)
            raise
        except Exception as error:
            raise self._fail("weight update", error) from error
        self._version = version
        self._open.set()

    def _fail(self, where: str, error: BaseException) -> EngineFailed:
        self._failed = f"{where}: {type(error).__name__}: {error}"
        return EngineFailed(self._failed)


WARN_S = 60.0
"""Time after which a wait for the GPU is named in the log, again and again."""
END_S = 5.0
"""Longest time that the end of this engine waits for its task."""


class CanSleep(SamplingEngine, Protocol):
    """An engine that can give the memory of its GPU back and take it again."""

    async def sleep(self) -> None:
        """Give memory back. No request runs, and none comes until `wake`."""

    async def wake(self) -> None:
        """Take the memory again. Cached keys and values are gone; the weights are those of before."""


class SleepingEngine:
    """`SamplingEngine` that gives its GPU to the learner. `run` has to run beside it.

    Args:
        engine: awake at first.
        lock: this process holds it together with others.
    """

    def __init__(self, engine: CanSleep, lock: GpuLock) -> None:
        self.asleep = False
        self.kv, self.full_step_s, self.frozen = engine.kv, engine.full_step_s, engine.frozen
        self._engine, self._lock = engine, lock
        self._users = 0
        # Invariant: whoever holds it makes the engine sleep or wake.
        self._changing = asyncio.Lock()
        self._failed = ""
        self._ended_early: set[str] = set()
        """Requests that were ended before the engine was awake for them."""
        self._slept_s, self._slept_since = 0.0, 0.0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def steps(self) -> int:
        return self._engine.steps

    async def generate(self, request: Request) -> AsyncIterator[Sampled]:
        async with self.awake():
            if request.id in self._ended_early:
                self._ended_early.discard(request.id)
                yield nothing(finish_reason="abort")
                return
            async for sampled in self._engine.generate(request):
                yield sampled

    async def abort(self, request_id: str) -> None:
        if self.asleep:
            self._ended_early.add(request_id)
        else:
            await self._engine.abort(request_id)

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            async with self._changing:
                if self.asleep:
                    await hold_together(self._lock)
                    await self._done("wake", self._engine.wake)
                    self._slept_s += time.monotonic() - self._slept_since
                    self.asleep = False
            yield
        finally:
            self._users -= 1

    async def apply_weights(self, manifest: Manifest, data: Path) -> float:
        async with self.awake():
            return await self._engine.apply_weights(manifest, data)

    def health(self) -> str:
        return self._failed or self._engine.health()

    def gauges(self) -> dict[str, float]:
        now = time.monotonic() - self._slept_since if self.asleep else 0.0
        return self._engine.gauges() | {"asleep_seconds_total": self._slept_s + now}

    async def close(self) -> None:
        await self._engine.close()

    async def run(self) -> None:
        """Sleep whenever the learner wants the GPU and nobody samples. It ends when it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.asleep and not self._users and self._lock.wanted_alone():
                await self._sleep()

    async def _sleep(self) -> None:
        async with self._changing:
            # A request may have come while another change was under way.
            if self.asleep or self._users:
                return
            self.asleep, self._slept_since = True, time.monotonic()
            if await self._done("sleep", self._engine.sleep):
                self._lock.release()

    async def _done(self, what: str, change: Callable[[], Awaitable[None]]) -> bool:
        """Make a change of the engine. Return whether it went well; an engine that failed is lost."""
        try:
            await change()
        except Exception as error:
            self._failed = f"{what}: {type(error).__name__}: {error}"
            log.exception("the engine could not %s", what)
            return False
        return True


async def hold_together(lock: GpuLock) -> None:
    """Wait until generators may use the GPU, and hold its lock together with them.

    The learner's own deadlines bound its update, and the kernel releases its lock if it ends.
    """
    began = told = time.monotonic()
    while not lock.take_together():
        await asyncio.sleep(LOOK_S)
        if (now := time.monotonic()) - told > WARN_S:
            told = now
            log.warning(
                "the learner has used the shared GPU for %.0f s; this generator waits for it", now - began
            )


@contextlib.asynccontextmanager
async def sleeping(engine: CanSleep, lock: GpuLock) -> AsyncIterator[SleepingEngine]:
    """Let an engine sleep in updates while the context lasts.

    Args:
        engine: awake.
        lock: this process holds it together with others.
    """
    shared = SleepingEngine(engine, lock)
    task = asyncio.create_task(shared.run(), name="sleep in updates")
    try:
        yield shared
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=END_S)
