"""An engine that sleeps while the learner updates the policy on the same GPU, in lockstep.

While it is awake it holds the lock of `protocol.gpu_lock` together with others. It releases it when the learner wants
it and nobody samples, and wakes for the next request or version.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from actors.generator.engine import Request, SamplingEngine
from actors.sampled import Sampled, nothing
from protocol.gpu_lock import LOOK_S, GpuLock
from protocol.weights.format import Manifest

log = logging.getLogger(__name__)

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
