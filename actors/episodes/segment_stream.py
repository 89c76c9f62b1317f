"""Sends the segments of one trajectory in the order in which they were cut."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from actors.episodes.clock import EpisodeClock
from actors.segments import SegmentCutter
from protocol.arrays import SegmentArrays
from protocol.messages.tasks import Task

Emit = Callable[[Sequence[SegmentArrays]], Awaitable[None]]


class SegmentStream:
    """Cuts and sends the segments of a trajectory.

    Args:
        in_step: lockstep in windows, see `actors.episode.Bounds`.
        emit: takes segments. It takes all of one call before its first wait.
    """

    def __init__(
        self,
        task: Task,
        trajectory_id: str,
        *,
        segment_tokens: int,
        in_step: bool,
        emit: Emit,
        clock: EpisodeClock,
    ) -> None:
        self.cutter = SegmentCutter(task, trajectory_id, segment_tokens)
        self._emit, self._clock, self.in_step = emit, clock, in_step
        self.min_version = task.min_policy_version
        """Oldest version that may sample the next tokens."""
        self.closed = False
        """True once the closing segment was handed over."""
        self._cuts: list[SegmentArrays] = []
        self._sending = asyncio.Lock()

    async def send(self, cuts: Sequence[SegmentArrays]) -> None:
        """Hand over segments, behind those of earlier calls."""
        if not cuts:
            return
        if self.in_step:
            self.min_version = max(self.min_version, *(cut.segment.version_max + 1 for cut in cuts))
        self._cuts += cuts
        # The wait for room in the outbox is a wait for the broker, so it does not count for the deadline.
        with self._clock.waiting():
            async with self._sending:
                # A cancellation may end any wait, and a missing segment leaves a gap. So what a cancelled call has left
                # goes first, and all of them go in one call.
                cuts, self._cuts = self._cuts, []
                if not cuts:
                    return
                await self._emit(cuts)
                self.closed = cuts[-1].segment.status != "unfinished"
