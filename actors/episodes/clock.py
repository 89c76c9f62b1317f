"""The deadline of an episode, which stands while the episode waits for others."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EpisodeClock:
    """Bounds the time of an episode, without the time in which it waits for a generator or for the broker.

    Several tasks of an episode may wait at a time. The clock stands if one of them waits, and none works. It runs while
    no task is known, because then the environment is at work.
    """

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None
        self._left: float | None = None
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._working: set[asyncio.Task[Any] | None] = set()

    def start(self, timeout: asyncio.Timeout) -> None:
        """Take over a timeout that has begun."""
        self._timeout = timeout

    def stop(self) -> bool:
        """Leave the timeout alone from now on. Return whether it has expired."""
        late = self._timeout is not None and self._timeout.expired()
        self._timeout = None
        return late

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the present task waits for others."""
        with self._among(self._waiting):
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Note that the present task works, unless it waits."""
        with self._among(self._working):
            yield

    @contextmanager
    def _among(self, tasks: set[asyncio.Task[Any] | None]) -> Iterator[None]:
        task = asyncio.current_task()
        if task in tasks:
            yield
            return
        tasks.add(task)
        self._look()
        try:
            yield
        finally:
            tasks.discard(task)
            self._look()

    def _look(self) -> None:
        """Let the clock stand or run."""
        timeout, now = self._timeout, asyncio.get_running_loop().time()
        if timeout is None or timeout.expired():
            return
        stands = bool(self._waiting) and self._working <= self._waiting
        if stands and self._left is None and (when := timeout.when()) is not None:
            self._left = when - now
            timeout.reschedule(None)
        elif not stands and self._left is not None:
            timeout.reschedule(now + self._left)
            self._left = None
