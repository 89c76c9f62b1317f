"""Trajectories that are trained window by window while they are still being generated. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from learner.errors import BrokenTrajectory, OpenStateError
from learner.trajectory import Trajectory, assemble
from protocol import names
from protocol.arrays import Arrays, SegmentArrays
from protocol.codec import decode_segment, encode_arrays, unpack_arrays
from protocol.errors import ProtocolError
from protocol.messages import Segment

State = Literal["open", "broken", "ended"]


class StoredAttempt(Struct, frozen=True, array_like=True):
    """An attempt in a checkpoint; its segments as header and body, like on the wire."""

    task_id: str
    number: int
    state: State
    pieces: list[tuple[bytes, bytes]]


_decoder = msgspec.msgpack.Decoder(list[StoredAttempt])


@dataclass
class _Attempt:
    """The newest attempt at a task and its segments so far; a broken one keeps none."""

    number: int
    pieces: list[SegmentArrays] = field(default_factory=list)
    state: State = "open"

    def knows(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Whether these are here already."""
        start = pieces[0][0].index
        own = self.pieces[start : start + len(pieces)]
        return len(own) == len(pieces) and all(map(_equal, own, pieces))


@dataclass
class OpenTrajectories:
    """The segments of every trajectory that has begun and is not done with, by task.

    They are kept until `forget`, which comes when the last window is trained or dropped: until then a
    checkpoint may be taken in which windows still wait, and they come again after a restart. What is kept
    of a task is bounded by the length of one trajectory.
    """

    _attempts: dict[str, _Attempt] = field(default_factory=dict)

    def __len__(self) -> int:
        """Trajectories that have begun and not ended."""
        return sum(bool(a.pieces) and a.state == "open" for a in self._attempts.values())

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        pieces = (piece for attempt in self._attempts.values() for piece in attempt.pieces)
        return sum(segment.tokens for segment, _ in pieces)

    def begun_anew(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Whether these belong to a second run of the same attempt, of which the first is here.

        So it is when a broker has lost its journal and counts attempts from 0 again.
        """
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or before.state != "open" or before.number != _number(first):
            return False
        return bool(before.pieces) and not before.knows(pieces)

    def displaced_by(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Let go of an earlier attempt at the task, if these begin another; True if it had not ended."""
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or _number(first) < before.number:
            return False
        if _number(first) == before.number and not (first.index == 0 and self.begun_anew(pieces)):
            return False
        del self._attempts[first.task_id]
        return bool(before.pieces) and before.state == "open"

    def extend(self, pieces: Sequence[SegmentArrays]) -> Trajectory | None:
        """Add the next segments, unless they are here; gives the trajectory up to them, with them as its window.

        Returns:
            None for what belongs to an attempt that is over or broken.

        Raises:
            BrokenTrajectory: segments before these are missing, or they do not fit; all of it is forgotten.
        """
        first, last = pieces[0][0], pieces[-1][0]
        attempt = self._attempts.setdefault(first.task_id, _Attempt(_number(first)))
        if _number(first) < attempt.number or attempt.state == "broken":
            return None
        known = attempt.knows(pieces)
        if attempt.state == "ended" and not known:
            return None
        whole = attempt.pieces[: first.index + len(pieces)] if known else [*attempt.pieces, *pieces]
        try:
            trajectory = replace(assemble(whole), window_start=first.offset)
        except BrokenTrajectory:
            attempt.pieces, attempt.state = [], "broken"
            raise
        if not known:
            attempt.pieces, attempt.state = whole, "open" if last.status == "unfinished" else "ended"
        return trajectory

    def ended(self, task_id: str) -> bool:
        """Whether the task's last segment is here."""
        attempt = self._attempts.get(task_id)
        return attempt is not None and attempt.state == "ended"

    def forget(self, task_id: str) -> None:
        """Nothing more will come of this task."""
        self._attempts.pop(task_id, None)

    def encode(self) -> bytes:
        """For the checkpoint."""
        return msgspec.msgpack.encode(
            [
                StoredAttempt(task_id, attempt.number, attempt.state, [_stored(*p) for p in attempt.pieces])
                for task_id, attempt in self._attempts.items()
            ]
        )

    def restore(self, data: bytes) -> None:
        """As they were when `encode` was called.

        Raises:
            OpenStateError: they cannot be read.
        """
        try:
            stored = _decoder.decode(data)
            attempts = {
                a.task_id: _Attempt(a.number, [_piece(*p) for p in a.pieces], a.state) for a in stored
            }
        except (msgspec.MsgspecError, ProtocolError) as error:
            raise OpenStateError(
                f"open trajectories of a checkpoint: {error}; delete their file to go on without them, "
                "which breaks the trajectories that are under way"
            ) from None
        self._attempts = attempts


def _number(segment: Segment) -> int:
    """Attempts are counted at the end of trajectory ids."""
    return names.attempt_of(segment.trajectory_id)


def _equal(one: SegmentArrays, other: SegmentArrays) -> bool:
    """Equal but for the layout of the body."""
    heads = [msgspec.structs.replace(segment, arrays=[]) for segment, _ in (one, other)]
    arrays, others = one[1], other[1]
    same = heads[0] == heads[1] and arrays.keys() == others.keys()
    return same and all(np.array_equal(arrays[name], others[name]) for name in arrays)


def _stored(segment: Segment, arrays: Arrays) -> tuple[bytes, bytes]:
    _, header, body = encode_arrays(segment, arrays)
    return bytes(header), bytes(body)


def _piece(header: bytes, body: bytes) -> SegmentArrays:
    segment = decode_segment(header)
    return SegmentArrays(segment, unpack_arrays(segment.arrays, body))
