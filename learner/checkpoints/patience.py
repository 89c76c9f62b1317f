"""How long the learner may write without a step: as long as the bytes take, so a slow disk is no hanging learner."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.messages.fields import MAX_PATIENCE_S

SLOWEST_BYTES_PER_S = 50e6
"""Rate of a disk that is expected before any write was measured, for example one that is reached over a network."""
SLOWER = 4.0
"""Factor by which a write may be slower than the slowest one so far."""
WRITTEN_BYTES = 16
"""Bytes for each parameter of the model that one write has at most: a checkpoint has 12."""


class WritePatience:
    """Says in heartbeats for how long the learner may write.

    Example:
        >>> now = iter([0.0, 30.0, 100.0, 130.0])
        >>> patience = WritePatience(clock=lambda: next(now))
        >>> with patience.writing(1_000_000_000):
        ...     patience.patience_s
        20.0
        >>> patience.patience_s, patience.writes
        (0.0, 1)
        >>> with patience.writing(1_000_000_000):
        ...     round(patience.patience_s)
        120
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slowest_s_per_byte = 0.0
        # Invariant: the link's thread reads these two numbers; only the learner's own thread changes them.
        self.patience_s = 0.0
        """Seconds that the write may take that is under way; 0 while nothing is written."""
        self.writes = 0
        """Writes that have ended."""

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        """Be patient with a write of so many bytes, for at most `protocol.messages.fields.MAX_PATIENCE_S`."""
        began = self._clock()
        slowest = max(1 / SLOWEST_BYTES_PER_S, SLOWER * self._slowest_s_per_byte)
        self.patience_s = min(MAX_PATIENCE_S, nbytes * slowest)
        try:
            yield
        finally:
            seconds = self._clock() - began
            self._slowest_s_per_byte = max(self._slowest_s_per_byte, seconds / max(1, nbytes))
            # The end of a write is progress. It is counted before the patience ends.
            self.writes += 1
            self.patience_s = 0.0
