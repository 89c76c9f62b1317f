"""Lets one thread at a time into a library that threads must not share. Every wait for it ends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from envs.errors import ServiceFailed


class LibraryLock:
    """Lock of a library, for all of its users in the process.

    Args:
        library: its name, for errors.

    Example:
        >>> lock = LibraryLock("TextWorld")
        >>> with lock.held("game1.z8", wait_s=1.0):
        ...     with lock.held("game2.z8", wait_s=0.01):
        ...         pass
        Traceback (most recent call last):
        envs.errors.ServiceFailed: game2.z8 has waited 0.01 s for TextWorld, which one thread at a time may use: \
game1.z8 is in it
    """

    def __init__(self, library: str) -> None:
        self._library, self._lock = library, threading.Lock()
        self._inside = ""
        """Who holds the lock. Invariant: written by the thread that holds it; others read it for errors only."""

    @contextmanager
    def held(self, who: str, wait_s: float) -> Iterator[None]:
        """Hold the lock.

        Args:
            who: words for the errors of others.
            wait_s: longest wait, in seconds.

        Raises:
            ServiceFailed: it was not free in this time. Whoever waits is not at fault.
        """
        if not self._lock.acquire(timeout=wait_s):
            raise ServiceFailed(
                f"{who} has waited {wait_s:g} s for {self._library}, which one thread at a time may use: "
                f"{self._inside or 'another one'} is in it"
            )
        self._inside = who
        try:
            yield
        finally:
            self._inside = ""
            self._lock.release()
