"""How much room the journal has: on the disk, and under its own limit."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from broker.journal.config import JournalConfig

log = logging.getLogger(__name__)

SPACE_S = 0.2


class Space:
    """Looks at the disk at most every `SPACE_S` seconds.

    Args:
        nbytes: returns the bytes of the journal, those that are not written yet included.
    """

    def __init__(self, folder: Path, config: JournalConfig, nbytes: Callable[[], int]) -> None:
        self._folder, self._config, self._nbytes = folder, config, nbytes
        self._looked_at = float("-inf")
        self.why_low = ""
        """What `is_low` found the last time it looked: which room is short, in bytes; "" if none is."""

    def is_low(self) -> bool:
        """Return whether the disk is nearly full, or the journal is too large."""
        now = time.monotonic()
        if now - self._looked_at >= SPACE_S:
            self._looked_at = now
            try:
                space = os.statvfs(self._folder)
                free = space.f_bavail * space.f_frsize
            except OSError as error:
                log.warning("journal: %s: %s", self._folder, error.strerror)
                free = 0
            self.why_low = self._config.why_low(free, self._nbytes())
        return bool(self.why_low)
