"""Learner steps as they were recorded, to be trained again by `learner.retrain.retrain`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.messages import Deliver


class RecordedUnit(NamedTuple):
    """A delivery as the broker sent it, and the frames behind its header."""

    deliver: Deliver
    frames: Sequence[bytes]


@dataclass(frozen=True)
class RecordedStep:
    """One learner step as it was."""

    step: int
    """From 1."""
    version: int
    """Policy version that was updated."""
    units: Sequence[RecordedUnit]
    """In the order in which they came; of windows also those that were dropped, which others have as context."""
    trained: Sequence[str]
    """Units of the batch, in its order."""
    forks: Sequence[tuple[int, int]] = ()
    """Of the learner's `protocol.version_line.VersionLine`."""
