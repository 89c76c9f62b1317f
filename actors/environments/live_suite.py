"""The suite of an actor, with the threads in which its code runs: made, watched, made anew, closed."""

import asyncio
import logging
from collections.abc import Callable

from actors.environments.runner import EnvironmentRunner, SuiteCaller
from envs.base import HasGauges, Suite
from protocol.gauges import ENV

log = logging.getLogger(__name__)

CLOSE_S = 10.0
REMAKE_S = 120.0
"""Longest time for making the suite anew after code has blocked the thread of the environments."""


class LiveSuite:
    """The suite, made at once. All methods are for the actor's event loop.

    Args:
        make: makes the suite, at once, and again if code has blocked the environments' thread.
        calls: plain functions that may run at the same time.
        timeout_s: longest time that the suite may take to report its gauges.
        on_failure: called with the reason if the suite cannot be made anew, or too many calls never end.
    """

    def __init__(
        self, make: Callable[[], Suite], *, calls: int, timeout_s: float, on_failure: Callable[[str], None]
    ) -> None:
        self._make, self._suite, self._timeout_s, self._on_failure = make, make(), timeout_s, on_failure
        self.environments = EnvironmentRunner(calls=calls)
        self.gauges: dict[str, float] = {}
        """Gauges of the suite, as it last reported them."""
        self._made_at = 0
        """Value of the runner's `loops_left` when the suite was made."""
        self._remaking: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Name code that blocks, and ask for gauges. Call it about once a second."""
        self.environments.look()
        if why := self.environments.exhausted:
            # Every episode would fail here at once, and so take tasks from actors that can run them.
            self._on_failure(f"environment: {why}")
        if isinstance(self._suite, HasGauges) and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_gauges(self._suite), name="gauges of the suite")

    async def ready(self) -> tuple[Suite, SuiteCaller]:
        """Return the suite, and what calls its code.

        Make it anew first if the old one belongs to an event loop that was left behind.
        """
        while self._made_at != self.environments.loops_left:
            if self._remaking is None:
                self._remaking = asyncio.create_task(self._remake(), name="make the suite anew")
            # The suite is for all episodes, so the end of one that waits for it must not end its making.
            await asyncio.shield(self._remaking)
        return self._suite, SuiteCaller(self.environments, self._made_at)

    async def close(self) -> None:
        """Close the suite and end its threads."""
        if self._closing is not None:
            await self._closing
        await self._close(self._suite)
        self.environments.close()

    async def _read_gauges(self, suite: HasGauges) -> None:
        """Read the gauges of the suite. An error in them must not stop the actor."""
        try:
            gauges = await self.environments.call(
                suite.gauges, what="gauges", timeout_s=self._timeout_s, on_loop=True
            )
            self.gauges = {f"{ENV}{name}": float(value) for name, value in gauges.items()}
        except Exception as error:
            log.warning("gauges of the environment: %r", error)

    async def _remake(self) -> None:
        loops_left, old = self.environments.loops_left, self._suite
        try:
            self._suite = await self.environments.call(
                self._make, what="making the environment anew", timeout_s=REMAKE_S
            )
        except Exception as error:
            self._on_failure(f"the environment could not be made anew: {error}")
        finally:
            self._made_at, self._remaking = loops_left, None
        if self._suite is not old:
            # Its processes and connections must not stay. Episodes do not wait for that.
            self._closing = asyncio.create_task(self._close(old), name="close the old suite")

    async def _close(self, suite: Suite) -> None:
        try:
            await self.environments.call(suite.close, what="close", timeout_s=CLOSE_S)
        except Exception as error:
            log.error("the environment did not close: %s", error)
