"""Decides how much work may be under way: as little as keeps the learner fed. Pure.

Lag is a price. The bound `learner.max_policy_lag` says what may be paid at most, and this module what has to be paid.
It replays on a virtual clock what was measured lately: units that take as long in the actors as units took, arrivals
that are a quarter faster than they were, and a learner that takes a batch, trains it, and deals as many new tasks. Of
all amounts of work under way it takes the smallest whose learner waits hardly longer than it would at the bound.

The quarter lets the amount grow where engines were not busy: if more work makes them faster, the next replay sees that.
If not, the amount stays.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from protocol.arrays import Float64s

HEADROOM = 1.25
"""How much faster than ever seen the replay lets units arrive."""
SPARE = 1.1
"""What is under way beside the batch in training, over what the replay needs: real durations come less evenly mixed."""
TOLERANCE = 0.005
"""How much more of its time the learner may wait than at the bound."""
REMEMBERED_BATCHES = 16
"""Batches whose units and steps are replayed."""
PARTS = 16
"""Parts of a batch in which amounts are compared. A large batch is replayed as so many parts."""
REPLAYED, SETTLING = 28, 4
"""Steps of a replay, and how many of them are not looked at, because they begin with nothing under way."""


class UnderWay:
    """The smallest number of units under way that keeps the learner fed.

    Units take one and a half times as long as a step. So two batches and a bit have to be under way beside the one in
    training:

    Example:
        >>> work = UnderWay(batch=8)
        >>> work.wanted(most=40)
        16
        >>> for step in range(4):
        ...     for member in range(8):
        ...         work.arrived(1.5, trained=True)
        ...     work.trained(update_s=1.0, step_s=1.0)
        >>> work.wanted(most=40)
        28
    """

    def __init__(self, batch: int) -> None:
        """Begin without measurements.

        Args:
            batch: units of a batch.
        """
        self._batch = batch
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_BATCHES * batch)
        self._dropped: deque[bool] = deque(maxlen=REMEMBERED_BATCHES * batch)
        self._arrived = 0
        """Units that arrived since the last step."""
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=REMEMBERED_BATCHES)
        """Seconds of the update, seconds of the step, and units that arrived in it."""
        self._known: dict[int, int] = {}

    def arrived(self, seconds: float | None, *, trained: bool) -> None:
        """Note a unit that has arrived.

        Args:
            seconds: how long its longest episode took in the actor; None: the actor does not tell.
            trained: whether it waits for a batch, and is not dropped at once.
        """
        self._arrived += 1
        self._dropped.append(not trained)
        if seconds is not None:
            self._seconds.append(seconds)

    def trained(self, update_s: float, step_s: float) -> None:
        """Note a step.

        Args:
            update_s: seconds from a full batch until new tasks were dealt.
            step_s: seconds of the step, with the wait for its batch.
        """
        self._steps.append((update_s, step_s, self._arrived))
        self._arrived = 0
        self._known.clear()

    def wanted(self, most: int) -> int:
        """Return how many units may be under way, the batch in training among them.

        Without measurements it is two batches: one to train, and one to sample meanwhile.

        Args:
            most: what the bound on policy lag allows, in units.
        """
        if most <= self._batch:
            return most
        if len(self._steps) < 2 or len(self._seconds) < self._batch:
            return min(most, 2 * self._batch)
        if most not in self._known:
            self._known[most] = self._smallest(most)
        return self._known[most]

    def _smallest(self, most: int) -> int:
        parts = min(self._batch, PARTS)
        scale = self._batch / parts
        update_s, step_s, arrived = np.asarray(self._steps).T
        replay = partial(
            waiting_share,
            np.sort(np.asarray(self._seconds)),
            update_s=float(np.median(update_s)),
            gap_s=float(step_s.sum()) / max(1.0, float(arrived.sum())) / HEADROOM * scale,
            dropped=sum(self._dropped) / len(self._dropped),
            batch=parts,
        )
        low, high = parts, max(parts + 1, math.floor(most / scale))
        allowed = replay(under_way=high) + TOLERANCE
        while low < high:
            middle = (low + high) // 2
            if replay(under_way=middle) <= allowed:
                high = middle
            else:
                low = middle + 1
        return min(most, self._batch + math.ceil(SPARE * (low - parts) * scale))


def waiting_share(
    seconds: Float64s | Sequence[float],
    *,
    update_s: float,
    batch: int,
    under_way: int,
    gap_s: float = 0.0,
    dropped: float = 0.0,
) -> float:
    """Return the share of its time that a learner waits, by a replay on a virtual clock.

    New tasks are dealt while the learner waits, and at the end of an update.

    Args:
        seconds: durations of units, in seconds; each is used equally often, in a fixed mixed order.
        update_s: seconds of an update.
        batch: units of a batch.
        under_way: units under way when tasks have been dealt, at least ``batch``.
        gap_s: least time between two arrivals, in seconds; 0: there is none.
        dropped: share of the units that train nothing, and whose room is free when they arrive. Below 1.

    Returns:
        0 to 1.

    Example:
        >>> waiting_share([1.0], update_s=1.0, batch=4, under_way=4)
        0.5
        >>> waiting_share([1.0], update_s=1.0, batch=4, under_way=8)
        0.0
        >>> waiting_share([3.0], update_s=1.0, batch=4, under_way=8)
        0.5
    """
    values = np.asarray(seconds, dtype=np.float64)
    # Steps of the golden section meet short and long ones in turn, whatever the number is.
    golden = np.arange(1024) * 0.6180339887498949 % 1
    mixed = values[(golden * len(values)).astype(int)].tolist()
    drops = ((np.arange(1024) * 0.41421356237309503 % 1) < min(dropped, 0.95)).tolist()
    ends: list[float] = []
    dealt = came = 0
    now, last, waited, looked_at = 0.0, -math.inf, 0.0, 0.0
    for step in range(REPLAYED):
        for _ in range(under_way - len(ends)):
            heapq.heappush(ends, now + mixed[dealt % 1024])
            dealt += 1
        began, left = now, batch
        while left:
            last = max(heapq.heappop(ends), last + gap_s)
            came += 1
            if drops[came % 1024]:
                heapq.heappush(ends, max(began, last) + mixed[dealt % 1024])
                dealt += 1
            else:
                left -= 1
        now = max(now, last)
        if step >= SETTLING:
            waited += now - began
            looked_at += now - began + update_s
        now += update_s
    return waited / looked_at if looked_at else 0.0
