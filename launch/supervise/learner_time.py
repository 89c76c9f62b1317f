"""How long the learner of a run may train, end when asked to, and exit after its result. Pure."""

from collections.abc import Mapping
from typing import Any

LEARNER_STOP_S = 60.0
LEARNER_EXIT_S = 60.0
SHORTEST_MINUTES = 0.01
"""Least time limit, in minutes, of a learner that is started when the run's time is over."""


class LearnerTime:
    """The times of one run's learner, over all its starts.

    Args:
        max_minutes: time limit of the run.

    Example:
        >>> learner = LearnerTime(max_minutes=10.0)
        >>> learner.minutes_left(100.0), learner.minutes_left(160.0), learner.minutes_left(9e9)
        (10.0, 9.0, 0.01)
        >>> learner.exits_late(200.0), learner.exits_late(250.0), learner.exits_late(261.0)
        (False, False, True)
    """

    def __init__(self, max_minutes: float) -> None:
        self._max_minutes = max_minutes
        self._began: float | None = None
        self._result_seen: float | None = None
        self.exit_s = LEARNER_EXIT_S
        """Longest time between the learner's result and the end of its process."""
        self.stop_s = LEARNER_STOP_S
        """Longest time that the learner may take to end: longer if it has written a large checkpoint."""

    def started(self) -> None:
        """Forget the result of an earlier start."""
        self._result_seen = None

    def minutes_left(self, now: float) -> float:
        """Return the rest of the run's time limit: a restarted learner does not get all of it again."""
        if self._began is None:
            self._began = now
        return max(SHORTEST_MINUTES, self._max_minutes - (now - self._began) / 60)

    def heard(self, peer: Mapping[str, Any]) -> None:
        """Take the learner's entry in the broker's answer, with the patience that it asks for."""
        self.stop_s = max(self.stop_s, LEARNER_STOP_S + peer.get("patience_s", 0.0))

    def exits_late(self, now: float) -> bool:
        """Return whether the learner's result, which is there, was first seen more than ``exit_s`` ago."""
        if self._result_seen is None:
            self._result_seen = now
            return False
        return now - self._result_seen > self.exit_s
