"""How far weights are from one another where a learner was set back to a checkpoint. Pure.

Version numbers only grow. A learner that takes up a checkpoint publishes its weights under a number above all that
were published before, and says which version they continue; so versions are a tree, and only one line of it is alive:

    0 -- 1 -- ... -- 10 -- 11 -- ... -- 19      19 was the newest when the learner died
                      \\
                       20 -- 21 -- ...          20 has the weights of 10

Policy lag is counted in versions along that tree: 10 lags nothing behind 20, and 17 lags seven, as if it were 13.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_FORKS = 64
"""What is older than so many restarts is counted by its number alone."""


class VersionLine:
    """The line of weights that is trained now, and where it left others.

    Args:
        forks: pairs (version continued, its new number), in the order in which they came about; the newest `MAX_FORKS`
            count.

    Raises:
        ValueError: numbers do not grow.

    Example:
        >>> line = VersionLine([(10, 20)])
        >>> [line.place(version) for version in (8, 10, 11, 17, 20, 23)]
        [18, 20, 19, 13, 20, 23]
        >>> line.lag(17, 23)
        10
    """

    def __init__(self, forks: Iterable[tuple[int, int]] = ()) -> None:
        self.forks: tuple[tuple[int, int], ...] = ()
        self._continued: list[int] = []
        self._best: list[int] = []
        for continued, number in forks:
            self._add(continued, number)
        self._look_ahead()

    @property
    def start(self) -> int:
        """First number of the line that is alive; 0 as long as no learner was set back."""
        return self.forks[-1][1] if self.forks else 0

    def fork(self, continued: int, number: int) -> None:
        """Version ``number`` has the weights of ``continued``."""
        self._add(continued, number)
        self._look_ahead()

    def place(self, version: int) -> int:
        """The number on the newest line, or before it, that lags as far behind as this version does."""
        start = self.start
        return version if version >= start or version < 0 else start - self._distance(version, start)

    def freshest(self, version: int) -> int:
        """The latest place of any version up to this one."""
        if version >= self.start or version < 0:
            return version
        best = bisect_right(self._continued, version)
        return max(self.place(version), self._best[best - 1] if best else 0)

    def lag(self, version: int, current: int) -> int:
        """Versions between two sets of weights; ``current`` is on the newest line."""
        return current - self.place(version)

    def placed(self, versions: NDArray[Any]) -> NDArray[Any]:
        """`place` of each element, same shape and dtype; -1 (no version) stays as it is."""
        if not self.forks or not len(versions) or int(versions.min()) >= self.start:
            return versions
        numbers, where = np.unique(versions, return_inverse=True)
        return np.array([self.place(int(n)) for n in numbers], dtype=versions.dtype)[where]

    def _add(self, continued: int, number: int) -> None:
        if not 0 <= continued < number or number <= self.start:
            raise ValueError(
                f"version {number} cannot continue {continued}: numbers only grow, the line begins at {self.start}"
            )
        self.forks = (*self.forks, (continued, number))[-MAX_FORKS:]

    def _look_ahead(self) -> None:
        """Where lines were left is where the freshest of what is older by number lies."""
        self._continued = sorted(continued for continued, _ in self.forks)
        self._best, best = [], 0
        for continued in self._continued:
            best = max(best, self.place(continued))
            self._best.append(best)

    def _distance(self, one: int, other: int) -> int:
        passed = 0
        starts = [number for _, number in self.forks]
        while (i := bisect_right(starts, one)) != (j := bisect_right(starts, other)):
            if i > j:
                one, other, j = other, one, i
            continued, number = self.forks[j - 1]  # the later branch, back to where it began
            passed, other = passed + other - number, continued
        return passed + abs(one - other)
