"""Recorded learner steps, which `learner.retrain` trains again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.messages.episodes import Deliver, Task


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
    """Units in the order of delivery. Dropped windows and dropped groups of families are among them: later windows need
    their context, later groups are compared with the first, and judgements value answers."""
    trained: Sequence[str]
    """Ids of the batch's units, in the order of the batch."""
    forks: Sequence[tuple[int, int]] = ()
    """Forks of the learner's `protocol.version_line.VersionLine`."""
    tasks: Sequence[Task] = ()
    """Tasks of the units that have a note or a prefix."""
