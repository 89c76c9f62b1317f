"""The virtual clock of a simulated run, and a work that slows down and speeds up. Pure; no waiting, no threads."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Lets planned events happen in order of their times, and those of one time in the order they were planned.

    Example:
        >>> clock, happened = VirtualClock(), []
        >>> clock.schedule(2.0, lambda: happened.append(clock.now))
        >>> clock.schedule(1.0, lambda: happened.append(clock.now))
        >>> clock.last, clock.step(), clock.step(), clock.step(), happened
        (2.0, True, True, False, [1.0, 2.0])
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def schedule(self, when: float, happen: Callable[[], None]) -> None:
        """Plan an event; one in the past happens now."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), happen))

    def step(self) -> bool:
        """Go on to the next event. Return whether there was one."""
        if not self._events:
            return False
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        return True

    @property
    def last(self) -> float:
        """Time of the last planned event."""
        return max(when for when, _, _ in self._events)


class SimulatedWork:
    """One work after the other on cores that may be shared, so that its end is planned again and again.

    Example:
        >>> work = SimulatedWork()
        >>> work.begin(4.0, lambda: None, now=0.0)
        >>> work.next_end(now=0.0, slow=1.0), work.stamp
        (4.0, 1)
        >>> work.progress(now=1.0, slow=1.0)
        >>> work.next_end(now=1.0, slow=2.0), work.end(stamp=1) is None, work.end(stamp=2) is None
        (7.0, True, False)
    """

    def __init__(self) -> None:
        self._left_s, self._at = 0.0, 0.0
        self._then: Callable[[], None] | None = None
        self.stamp = 0
        """Number of the newest plan. An end that was planned before does not count."""

    @property
    def active(self) -> bool:
        return self._then is not None

    def begin(self, seconds: float, then: Callable[[], None], now: float) -> None:
        """Begin a work.

        Args:
            seconds: its length if alone on its cores.
            then: function to call at its end.
        """
        self._left_s, self._then, self._at = seconds, then, now

    def progress(self, now: float, slow: float) -> None:
        """Take off what was done since the last call, at this slowdown."""
        if self.active:
            self._left_s = max(0.0, self._left_s - (now - self._at) / slow)
            self._at = now

    def next_end(self, now: float, slow: float) -> float | None:
        """Return when the work will end at this slowdown, under a new stamp; None without one."""
        self.stamp += 1
        return now + self._left_s * slow if self.active else None

    def end(self, stamp: int) -> Callable[[], None] | None:
        """End the work. Return what follows; None if this end was planned again meanwhile."""
        if stamp != self.stamp:
            return None
        then, self._then = self._then, None
        return then
