"""Sends segments as far as the broker's credit reaches. Episodes wait while too many segments wait for credit."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from actors.uplink.outbox import Outbox
from protocol.arrays import SegmentArrays
from protocol.link import AsyncLink

log = logging.getLogger(__name__)

WAITING_SEGMENTS = 64
"""Segments that may wait for credit. With more, episodes wait before they go on."""


class SegmentSender:
    """Segments of all episodes on their way to the broker. All methods are for the actor's event loop.

    Args:
        link: connection to the broker.
    """

    def __init__(self, link: AsyncLink) -> None:
        self.outbox = Outbox()
        self.tokens = 0
        """Tokens of all segments so far."""
        self._link = link
        self._room = asyncio.Event()

    async def emit(self, cuts: Sequence[SegmentArrays]) -> None:
        """Put all segments into the outbox before the first wait, then wait until the outbox has room."""
        for cut in cuts:
            self.tokens += cut.segment.tokens
            self.outbox.offer(cut)
        self.flush()
        while self.outbox.waiting > WAITING_SEGMENTS:
            self._room.clear()
            await self._room.wait()

    def flush(self) -> None:
        """Send what the credit allows, and wake the episodes that wait for room."""
        # Between Hello and Welcome nothing is sent, because the broker is about to count the credit anew.
        if self._link.session.joined:
            for frames in self.outbox.due():
                self._link.send_frames(frames)
        self._room.set()

    def granted(self, segments: int) -> None:
        """Add the broker's credit for ``segments`` more segments, and use it."""
        self.outbox.granted(segments)
        self.flush()

    async def emptied(self, timeout_s: float) -> None:
        """Wait until the broker has acknowledged all segments, ``timeout_s`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.outbox.empty:
                    self._room.clear()
                    await self._room.wait()

    def gauges(self) -> dict[str, float]:
        """Return what the actor reports of its segments."""
        return {
            "tokens_total": float(self.tokens),
            "segments_waiting": float(self.outbox.waiting),
            "segments_refused_total": float(self.outbox.acks["refused"]),
        }
