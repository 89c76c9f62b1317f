"""Takes announced weight versions through staging and verification into the engine."""

import asyncio
import logging
from collections.abc import Callable

from actors.errors import EngineFailed, UpdateRefused
from actors.generator.engine import SamplingEngine
from actors.generator.weights.staging import Announced, NewestWins, Stage
from protocol.errors import WeightsError

log = logging.getLogger(__name__)

STAGE_TIMEOUT_S = 3600.0
LOAD_BYTES_PER_S = 50e6
"""Slowest pace of a load, slower than any memory. `load_deadline` adds the time of the bytes at this pace."""


def load_deadline(nbytes: int, *, patience_s: float, longest_s: float) -> float:
    """Return the seconds that loading a version of ``nbytes`` may take.

    Example:
        >>> load_deadline(100_000_000, patience_s=8.0, longest_s=300.0)
        10.0
    """
    return min(longest_s, patience_s + nbytes / LOAD_BYTES_PER_S)


class WeightUpdater:
    """Applies one update at a time, always the newest announced version.

    A version that fails its verification is counted, logged and skipped, and the engine stays unchanged.
    After a load that fails or takes too long, nobody may sample from the engine, so ``on_failure`` ends this
    process. The deadline of a load depends on its size, so that an engine that hangs in a load is found
    nearly as soon as one that hangs while it samples.

    Args:
        on_failure: called with the reason when this process has to end.
        patience_s: longest time for a load of zero bytes.
        longest_s: longest time for a load of any size.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        queue: NewestWins,
        stage: Stage,
        run: str,
        *,
        on_failure: Callable[[str], None],
        patience_s: float = 8.0,
        longest_s: float = 300.0,
    ) -> None:
        self.loading = False
        self.note = ""
        """Why the newest announced version is not in service, with the cure; "" if nothing is known to hinder it."""
        self._engine, self._queue, self._stage, self._run = engine, queue, stage, run
        self._on_failure = on_failure
        self._patience_s, self._longest_s = patience_s, longest_s
        self._offered = asyncio.Event()
        self._applied = 0
        self._refused = 0
        self._pause_s = 0.0

    def offer(self, announced: Announced) -> None:
        """Take an announcement of the broker, which repeats it until the version is in service."""
        if self._queue.offer(announced):
            self._offered.set()
        elif announced < self._queue.in_service:
            in_service = self._queue.in_service
            self._refuse(
                f"epoch {announced.epoch} version {announced.version} is behind what is in service, "
                f"epoch {in_service.epoch} version {in_service.version}"
            )

    async def run(self, on_applied: Callable[[], None]) -> None:
        """Apply updates until cancelled."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            while announced := self._queue.take():
                applied = await self.update(announced)
                self._queue.finish(announced, applied=applied)
                if applied:
                    on_applied()

    async def update(self, announced: Announced) -> bool:
        """Stage, verify and load one version. Return True if it is in service now."""
        try:
            async with asyncio.timeout(STAGE_TIMEOUT_S):
                manifest, data = await asyncio.to_thread(self._stage.stage, announced, self._run)
        except TimeoutError:
            # The thread cannot be ended, so this process has to end.
            self._on_failure(
                f"fetching and verifying version {announced.version} took longer than {STAGE_TIMEOUT_S:g} s; is "
                f"{announced.manifest} on a file system that hangs?"
            )
            return False
        except WeightsError as error:
            self._refuse(str(error))
            self.note = f"new weights do not arrive: {error}"
            return False
        allowed_s = load_deadline(manifest.nbytes, patience_s=self._patience_s, longest_s=self._longest_s)
        self.loading = True
        try:
            # An engine may have to wait for the learner before it wakes, which is no time of the load.
            async with self._engine.awake(), asyncio.timeout(allowed_s):
                self._pause_s = await self._engine.apply_weights(manifest, data)
        except UpdateRefused as error:
            self._queue.never(announced)
            self._refuse(str(error))
            self.note = f"the engine takes no new weights: {error}"
            return False
        except (EngineFailed, TimeoutError) as error:
            why = str(error) or f"it took longer than {allowed_s:.1f} s"
            self._on_failure(f"loading version {announced.version} failed, the engine is lost: {why}")
            return False
        finally:
            self.loading = False
            self._stage.discard(data)
        self._stage.accepted(manifest)
        self._applied += 1
        self.note = ""
        log.info("policy version %d in service, paused for %.0f ms", manifest.version, 1e3 * self._pause_s)
        return True

    def gauges(self) -> dict[str, float]:
        return {
            "update_pause_seconds": self._pause_s,
            "updates_applied_total": float(self._applied),
            "updates_refused_total": float(self._refused),
            "updates_skipped_total": float(self._queue.skipped),
        }

    def _refuse(self, why: str) -> None:
        self._refused += 1
        log.warning("weight update refused, sampling goes on as before: %s", why)
