"""The fleet as the broker sees it: how long it waits for peers, and whether anybody could do the work. Pure."""

import math
from dataclasses import dataclass

from broker.core.autoscaling import EVERY_NUMBER, Bounds


@dataclass(frozen=True)
class Limits:
    """How long the broker waits for peers, in seconds."""

    orphan_s: float = math.inf
    """An actor or generator that has had no learner for so long is asked to end."""
    over_s: float = 30.0
    """Longest time that peers get to say Goodbye when the run is over."""
    bounds: Bounds = EVERY_NUMBER
    """Numbers of generators and actors between which the broker's advice stays."""


FOR_EVER = Limits()
"""Limits of a broker whose peers wait for a learner for ever."""


@dataclass
class Capacity:
    """Measures for how long tasks wait that nobody can run: no generator serves, or no actor is there.

    Example:
        >>> capacity = Capacity()
        >>> for now in (0.0, 10.0, 25.0):
        ...     capacity.look(tasks=24, generators=0, actors=2, now=now)
        >>> capacity.spell_s, capacity.total_s, capacity.missing
        (25.0, 25.0, 'no generator serves')
        >>> capacity.look(tasks=24, generators=1, actors=2, now=30.0)
        >>> capacity.spell_s, capacity.total_s, capacity.missing
        (0.0, 30.0, '')
    """

    total_s: float = 0.0
    """Seconds without capacity since the broker started."""
    missing: str = ""
    """What is missing, in words; "" if nothing is, or if there is no task."""
    _since: float = 0.0
    """Time since when something has been missing."""
    _looked: float = 0.0

    @property
    def spell_s(self) -> float:
        """Seconds for which something has been missing without a break; 0 if nothing is missing."""
        return self._looked - self._since if self.missing else 0.0

    def look(self, *, tasks: int, generators: int, actors: int, now: float) -> None:
        """Look at what is there now. Call it at intervals.

        Args:
            tasks: tasks that wait or are under way.
            generators: generators that actors may use.
            actors: connected actors.
        """
        lacks = [
            *(["no generator serves"] if not generators else []),
            *(["no actor has joined"] if not actors else []),
        ]
        if self.missing:
            self.total_s += now - self._looked
        elif tasks and lacks:
            self._since = now
        self.missing, self._looked = " and ".join(lacks) if tasks else "", now

    def gauges(self) -> dict[str, float]:
        """Return the gauges of the fleet."""
        return {"fleet/no_capacity_seconds": self.total_s, "fleet/no_capacity_now_seconds": self.spell_s}
