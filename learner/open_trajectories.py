"""Trajectories that are trained window by window while they are still being generated. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from learner.trajectory import BrokenTrajectory, Trajectory, assemble
from protocol.codec import Arrays
from protocol.messages import Segment

Piece = tuple[Segment, Arrays]


@dataclass
class _Attempt:
    """The newest attempt at a task and its segments so far."""

    number: int
    pieces: list[Piece] = field(default_factory=list)
    state: Literal["open", "broken", "ended"] = "open"
    """Of one that is not open nothing is kept, and what else comes is of no use."""

    def close(self, state: Literal["broken", "ended"]) -> None:
        self.pieces, self.state = [], state

    def knows(self, pieces: Sequence[Piece]) -> bool:
        """Whether these are here already: delivered again because our answer was lost."""
        start = pieces[0][0].index
        own = self.pieces[start : start + len(pieces)]
        return len(own) == len(pieces) and all(map(_equal, own, pieces))


@dataclass
class OpenTrajectories:
    """The segments so far of every trajectory that has begun and not ended, by task.

    What is kept of a task is bounded by the length of one trajectory; `forget` ends it.
    """

    _attempts: dict[str, _Attempt] = field(default_factory=dict)

    def __len__(self) -> int:
        """Trajectories of which segments are kept."""
        return sum(bool(attempt.pieces) for attempt in self._attempts.values())

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        pieces = (piece for attempt in self._attempts.values() for piece in attempt.pieces)
        return sum(segment.tokens for segment, _ in pieces)

    def displaced_by(self, pieces: Sequence[Piece]) -> bool:
        """Let go of an earlier attempt at the task, if these begin another; True if it had not ended."""
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or _number(first) < before.number:
            return False
        # The number is the same when the broker was restarted and knows nothing of the first run.
        again = first.index == 0 and bool(before.pieces) and not before.knows(pieces)
        if _number(first) == before.number and not again:
            return False
        del self._attempts[first.task_id]
        return bool(before.pieces)

    def extend(self, pieces: Sequence[Piece]) -> Trajectory | None:
        """Add the next segments; gives the trajectory so far, these segments as its window.

        Returns:
            None for what is known already, or belongs to an attempt that is over or broken.

        Raises:
            BrokenTrajectory: segments before these are missing, or they do not fit; all of it is forgotten.
        """
        first, last = pieces[0][0], pieces[-1][0]
        attempt = self._attempts.setdefault(first.task_id, _Attempt(_number(first)))
        if attempt.state != "open" or _number(first) < attempt.number or attempt.knows(pieces):
            return None
        whole = [*attempt.pieces, *pieces]
        try:
            trajectory = replace(assemble(whole), window_start=first.offset)
        except BrokenTrajectory:
            attempt.close("broken")
            raise
        if last.status == "unfinished":
            attempt.pieces = whole
        else:
            attempt.close("ended")
        return trajectory

    def ended(self, task_id: str) -> bool:
        """Whether the task's last segment is here."""
        attempt = self._attempts.get(task_id)
        return attempt is not None and attempt.state == "ended"

    def forget(self, task_id: str) -> None:
        """Nothing more will come of this task."""
        self._attempts.pop(task_id, None)


def _number(segment: Segment) -> int:
    """Attempts are counted at the end of trajectory ids."""
    return int(segment.trajectory_id.rpartition(".")[2])


def _equal(one: Piece, other: Piece) -> bool:
    return one[0] == other[0] and all(np.array_equal(one[1][name], other[1][name]) for name in one[1])
