"""Policy lag between versions where a learner went back to a checkpoint. Pure.

Version numbers only grow. A learner that resumes from a checkpoint publishes its weights under a number above
all that were published before, and says which version they continue. So versions form a tree, and only one
line of it is alive:

    0 -- 1 -- ... -- 10 -- 11 -- ... -- 19      19 was the newest when the learner died
                      \\
                       20 -- 21 -- ...          20 has the weights of 10

Policy lag is counted in versions along that tree: 10 lags zero versions behind 20, and 17 lags seven,
as 13 does.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_FORKS = 64
"""Restarts that are remembered. The lag of a version from before them is the difference of the numbers."""


class VersionLine:
    """The line of weights that is trained now, and the places where it left older lines.

    Args:
        forks: pairs (version continued, its new number), oldest first; only the newest `MAX_FORKS` count.

    Raises:
        ValueError: the numbers do not grow.

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
        self._index_forks()

    @property
    def start(self) -> int:
        """First version of the line that is alive; 0 if no learner has gone back to a checkpoint."""
        return self.forks[-1][1] if self.forks else 0

    def fork(self, continued: int, number: int) -> None:
        """Add a restart: version ``number`` has the weights of ``continued``.

        Raises:
            ValueError: the numbers do not grow.
        """
        self._add(continued, number)
        self._index_forks()

    def place(self, version: int) -> int:
        """Return the number on the newest line, or below its start, that lags as far as this version."""
        start = self.start
        return version if version >= start or version < 0 else start - self._distance(version, start)

    def freshest(self, version: int) -> int:
        """Return the largest `place` of any version up to this one."""
        if version >= self.start or version < 0:
            return version
        best = bisect_right(self._continued, version)
        return max(self.place(version), self._best[best - 1] if best else 0)

    def lag(self, version: int, current: int) -> int:
        """Return the policy lag of ``version`` behind ``current``, which is on the newest line."""
        return current - self.place(version)

    def placed(self, versions: NDArray[Any]) -> NDArray[Any]:
        """Return `place` of each element, with shape and dtype unchanged; -1 (no version) stays -1."""
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

    def _index_forks(self) -> None:
        """Store the largest place up to each continued version, for `freshest`.

        Up to any number below `start`, the freshest version is that number or one that was continued.
        """
        self._continued = sorted(continued for continued, _ in self.forks)
        self._best, best = [], 0
        for continued in self._continued:
            best = max(best, self.place(continued))
            self._best.append(best)

    def _distance(self, one: int, other: int) -> int:
        """Return the number of versions on the way between two versions of the tree."""
        passed = 0
        starts = [number for _, number in self.forks]
        while (i := bisect_right(starts, one)) != (j := bisect_right(starts, other)):
            if i > j:
                one, other, j = other, one, i
            # Follow the later branch back to where it began.
            continued, number = self.forks[j - 1]
            passed, other = passed + other - number, continued
        return passed + abs(one - other)
