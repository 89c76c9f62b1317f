"""Recorded learner steps, which `learner.retrain.retrain` trains again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.messages import Deliver


class RecordedUnit(NamedTuple):
    """A delivery as the broker sent it, and the frames after its header."""

    deliver: Deliver
    frames: Sequence[bytes]


@dataclass(frozen=True)
class RecordedStep:
    """One recorded learner step."""

    step: int
    """Number of the step, counted from 1."""
    version: int
    """Policy version that the step updated."""
    units: Sequence[RecordedUnit]
    """Units in the order of delivery; dropped windows included, because later windows need their context."""
    trained: Sequence[str]
    """Ids of the batch's units, in the order of the batch."""
    forks: Sequence[tuple[int, int]] = ()
    """Forks of the learner's `protocol.version_line.VersionLine`."""
