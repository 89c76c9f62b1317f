"""Lets one thread at a time into a library that threads must not share. Every wait for it ends."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from envs.errors import EnvError, ServiceFailed

STUCK = 2.0
"""Whoever is inside for so many times the wait of another one does not come back."""


class LibraryLock:
    """Lock of a library, for all of its users in the process.

    Args:
        library: its name, for errors.
        clock: returns a monotonic time, in seconds.

    Example:
        >>> lock = LibraryLock("TextWorld", clock=lambda: 0.0)
        >>> with lock.held("game1.z8", wait_s=1.0):
        ...     with lock.held("game2.z8", wait_s=0.01):
        ...         pass
        Traceback (most recent call last):
        envs.errors.ServiceFailed: game2.z8 has waited 0.01 s for TextWorld, which one thread at a time may use: \
game1.z8 is in it
    """

    def __init__(self, library: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._library, self._clock, self._lock = library, clock, threading.Lock()
        self._inside = ""
        """Who holds the lock. Invariant: written by the thread that holds it; others read it for errors only."""
        self._since = 0.0
        """Time at which it went in."""

    @contextmanager
    def held(self, who: str, wait_s: float) -> Iterator[None]:
        """Hold the lock.

        Args:
            who: words for the errors of others.
            wait_s: longest wait, in seconds.

        Raises:
            ServiceFailed: it was not free in this time. Whoever waits is not at fault.
            EnvError: whoever is inside has been there for `STUCK` times this wait. This counts as a failure, so that
                the run ends with this reason, and does not repeat tasks for ever.
        """
        if not self._lock.acquire(timeout=wait_s):
            inside_s = self._clock() - self._since
            if self._inside and inside_s > STUCK * wait_s:
                raise EnvError(
                    f"{self._inside} has been in {self._library} for {inside_s:.3g} s, and nobody else of this process "
                    "can use it; end this actor, and another one begins anew"
                )
            raise ServiceFailed(
                f"{who} has waited {wait_s:g} s for {self._library}, which one thread at a time may use: "
                f"{self._inside or 'another one'} is in it"
            )
        self._since, self._inside = self._clock(), who
        try:
            yield
        finally:
            self._inside = ""
            self._lock.release()
