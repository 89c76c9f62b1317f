"""Segments of trajectories that are trained window by window while they are being generated. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from learner.errors import BrokenTrajectory, OpenStateError
from learner.segments import assemble
from learner.trajectory import RouteLayers, Trajectory
from protocol import names
from protocol.arrays import Arrays, SegmentArrays
from protocol.codec import decode_segment, encode_arrays, unpack_arrays
from protocol.errors import ProtocolError
from protocol.messages.episodes import Segment

State = Literal["open", "broken", "ended"]


class StoredAttempt(Struct, frozen=True, array_like=True):
    """An attempt in a checkpoint; each segment is a header and a body, as on the wire."""

    task_id: str
    number: int
    state: State
    pieces: list[tuple[bytes, bytes]]


_decoder = msgspec.msgpack.Decoder(list[StoredAttempt])


@dataclass
class _Attempt:
    """The newest attempt at a task, with its segments so far; a broken attempt keeps none."""

    number: int
    pieces: list[SegmentArrays] = field(default_factory=list)
    state: State = "open"

    def knows(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Return whether the attempt already has these segments."""
        start = pieces[0][0].index
        own = self.pieces[start : start + len(pieces)]
        return len(own) == len(pieces) and all(map(_equal, own, pieces))


@dataclass
class OpenTrajectories:
    """Segments of every trajectory that has begun and whose last window is not yet trained or dropped, by
    task.

    They are kept until `forget`. A checkpoint may be written while windows still wait; after a restart the
    broker delivers those windows again, and they need the segments before them. At most the segments of one
    trajectory are kept for each task.
    """

    _attempts: dict[str, _Attempt] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of trajectories that have begun and not ended."""
        return sum(bool(a.pieces) and a.state == "open" for a in self._attempts.values())

    @property
    def tokens(self) -> int:
        """Number of tokens of all kept segments."""
        pieces = (piece for attempt in self._attempts.values() for piece in attempt.pieces)
        return sum(segment.tokens for segment, _ in pieces)

    def begun_anew(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Return whether the segments belong to a second run of an attempt of which the first run is here.

        That happens when the broker has lost its journal and counts attempts from 0 again.
        """
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or before.state != "open" or before.number != _number(first):
            return False
        return bool(before.pieces) and not before.knows(pieces)

    def displaced_by(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Remove the earlier attempt if the segments begin a new one; return whether it had segments and no
        end."""
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or _number(first) < before.number:
            return False
        if _number(first) == before.number and not (first.index == 0 and self.begun_anew(pieces)):
            return False
        del self._attempts[first.task_id]
        return bool(before.pieces) and before.state == "open"

    def extend(self, pieces: Sequence[SegmentArrays], layers: RouteLayers | None = None) -> Trajectory | None:
        """Add the next segments, unless they are here already.

        Args:
            layers: see `learner.segments.assemble`.

        Returns:
            The trajectory up to and including these segments, which are its window. None if they belong to an
            earlier, ended or broken attempt.

        Raises:
            BrokenTrajectory: earlier segments are missing, or these do not fit; the attempt's segments are
                removed.
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
            trajectory = replace(assemble(whole, layers), window_start=first.offset)
        except BrokenTrajectory:
            attempt.pieces, attempt.state = [], "broken"
            raise
        if not known:
            attempt.pieces, attempt.state = whole, "open" if last.status == "unfinished" else "ended"
        return trajectory

    def ended(self, task_id: str) -> bool:
        """Return whether the last segment of the task's trajectory is here."""
        attempt = self._attempts.get(task_id)
        return attempt is not None and attempt.state == "ended"

    def forget(self, task_id: str) -> None:
        """Remove the segments of a task, of which nothing more will come."""
        self._attempts.pop(task_id, None)

    def encode(self) -> bytes:
        """Return all attempts as bytes for the checkpoint."""
        return msgspec.msgpack.encode(
            [
                StoredAttempt(task_id, attempt.number, attempt.state, [_stored(*p) for p in attempt.pieces])
                for task_id, attempt in self._attempts.items()
            ]
        )

    def restore(self, data: bytes) -> None:
        """Restore the attempts that `encode` returned.

        Raises:
            OpenStateError: the data cannot be read.
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
    """Return the number of the attempt, which is at the end of the trajectory id."""
    return names.attempt_of(segment.trajectory_id)


def _equal(one: SegmentArrays, other: SegmentArrays) -> bool:
    """Return whether two segments are equal, apart from the layout of their bodies."""
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
