"""Trajectories that are trained window by window while they are still being generated. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from learner.trajectory import BrokenTrajectory, Trajectory, assemble
from protocol.codec import Arrays
from protocol.messages import Segment

Piece = tuple[Segment, Arrays]


@dataclass
class OpenTrajectories:
    """The segments so far of every trajectory that has begun and not ended, by task.

    A task has one trajectory at a time: the first segment of another attempt takes the place of what there was.
    """

    _pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pieces)

    def extend(self, pieces: Sequence[Piece]) -> Trajectory:
        """Add the next segments; gives the trajectory so far, these segments as its window.

        Raises:
            BrokenTrajectory: segments before these are missing, or they do not fit; all of it is forgotten.
        """
        first, last = pieces[0][0], pieces[-1][0]
        before = self._pieces.pop(first.task_id, []) if first.index else []
        if first.index and (not before or before[0][0].trajectory_id != first.trajectory_id):
            self._pieces.pop(first.task_id, None)
            raise BrokenTrajectory(
                f"trajectory {first.trajectory_id}: segment {first.index} without those before it"
            )
        whole = [*before, *pieces]
        trajectory = replace(assemble(whole), window_start=first.offset)
        if last.status == "unfinished":
            self._pieces[first.task_id] = whole
        else:
            self.forget(first.task_id)
        return trajectory

    def forget(self, task_id: str) -> None:
        """Nothing more will come of this task."""
        self._pieces.pop(task_id, None)
