"""Counts of episodes that ended, failed or were interrupted, since this broker process started. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from protocol.failures import FailureCounts, failure_or_text
from protocol.messages.segments import Failure, Segment

RECENT = 256
"""Number of episodes that ended last, of which `/status` says how many failed."""


@dataclass
class EpisodeCounts:
    """Outcomes of the episodes of all actors.

    Example:
        >>> counts = EpisodeCounts()
        >>> counts.interrupted(Failure(message="no generator", fault=False))
        >>> counts.page()["interrupted"], counts.page()["interrupted_why"]
        (1, 'no generator')
    """

    _failed: FailureCounts = field(default_factory=FailureCounts)
    _interruptions: FailureCounts = field(default_factory=FailureCounts)
    ended: int = 0
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    """True if each of the episodes that ended last has failed."""

    def closed(self, segment: Segment) -> None:
        """Count an episode by its closing segment."""
        failed = segment.status == "failed"
        self.ended += 1
        self._recent.append(failed)
        if failed:
            self._failed.add(failure_or_text(segment.failure, segment.error))

    def interrupted(self, failure: Failure) -> None:
        """Count an attempt that an actor rejects because of an error. Its task runs again."""
        self._interruptions.add(failure)

    def page(self) -> dict[str, Any]:
        """Return the section ``episodes`` of `/status`."""
        return {
            "ended": self.ended,
            "failed": self._failed.total,
            "recent": len(self._recent),
            "recent_failed": sum(self._recent),
            "why": self._failed.sentence(),
            "failures": self._failed.rows(),
            "interrupted": self._interruptions.total,
            "interrupted_why": self._interruptions.sentence(),
        }
