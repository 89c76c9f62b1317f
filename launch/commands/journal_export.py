"""Exports trajectories from a journal: as JSON Lines, or their arrays as safetensors."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from broker.errors import JournalError
from broker.journal.files import each_file, read_place
from broker.journal.records import Kind, Place, unpack_segment
from launch.errors import LaunchError
from protocol.arrays import Arrays
from protocol.codec import decode_segment, unpack_arrays
from protocol.errors import ProtocolError
from protocol.files import whole_file
from protocol.messages.episodes import Reward, Segment, TurnMark
from protocol.weights.format import layout

DTYPES = {"i2": "I16", "i4": "I32", "i8": "I64", "u1": "U8", "f4": "F32", "f8": "F64"}


class PlacedSegment(NamedTuple):
    """A segment without its arrays, and its place in the journal."""

    segment: Segment
    place: Place


def export(folder: Path, out: Path, format_: str, only: Collection[str] | None = None) -> str:
    """Write all trajectories of a journal, or ``only`` some, to ``out``. Return a line about the result.

    Raises:
        LaunchError: a named trajectory is missing, or the file cannot be written. An old file is unchanged.
        JournalError: the journal cannot be read.
    """
    found = trajectories(folder, only)
    if missing := sorted(set(only or ()) - found.keys()):
        raise LaunchError(
            f"{folder} has no trajectory {missing[0]!r}; `offbeat journal show --kind segment` lists them"
        )
    write = write_jsonl if format_ == "jsonl" else write_safetensors
    try:
        with whole_file(out, shared=True) as partial, open(partial, "wb") as file:
            write(folder, found, file)
    except OSError as error:
        raise LaunchError(f"--out {out}: {error.strerror}") from None
    pieces = [piece.segment for held in found.values() for piece in held]
    whole = sum(map(is_complete, found.values()))
    return (
        f"{out}: {len(found)} trajectories ({whole} complete), {len(pieces)} segments, "
        f"{sum(segment.tokens for segment in pieces)} tokens"
    )


def trajectories(folder: Path, only: Collection[str] | None = None) -> dict[str, list[PlacedSegment]]:
    """Return the segments of each trajectory, sorted by index; trajectories stand in the order they began.

    Raises:
        JournalError: there is no journal, or a segment in it cannot be read.
    """
    found: dict[str, dict[int, PlacedSegment]] = {}
    for contents in each_file(folder):
        for entry in contents.entries:
            if entry.kind is not Kind.SEGMENT:
                continue
            try:
                segment = decode_segment(unpack_segment(contents.record(entry).payload)[0])
            except ProtocolError as error:
                raise JournalError(
                    f"{folder}, record {entry.number}: {error}; another version wrote it"
                ) from None
            if only is None or segment.trajectory_id in only:
                found.setdefault(segment.trajectory_id, {})[segment.index] = PlacedSegment(
                    segment, entry.place
                )
    return {name: [held[index] for index in sorted(held)] for name, held in found.items()}


def is_complete(held: list[PlacedSegment]) -> bool:
    """Return whether a trajectory has ended and none of its segments is missing."""
    return [piece.segment.index for piece in held] == list(range(len(held))) and held[
        -1
    ].segment.status != "unfinished"


def _arrays(folder: Path, piece: PlacedSegment) -> Arrays:
    try:
        return unpack_arrays(piece.segment.arrays, unpack_segment(read_place(folder, piece.place))[1])
    except ProtocolError as error:
        raise JournalError(f"{piece.segment.trajectory_id}[{piece.segment.index}]: {error}") from None


# --- JSON Lines ---------------------------------------------------------------------------------------------


def write_jsonl(folder: Path, found: dict[str, list[PlacedSegment]], file: IO[bytes]) -> None:
    """Write one line per trajectory: its fields, and its arrays with the segments joined."""
    for held in found.values():
        file.write(msgspec.json.encode(_line(held, [_arrays(folder, piece) for piece in held])) + b"\n")


def _line(held: list[PlacedSegment], arrays: list[Arrays]) -> dict[str, Any]:
    first, last = held[0].segment, held[-1].segment
    names = dict.fromkeys(name for part in arrays for name in part)
    return {
        "trajectory_id": first.trajectory_id,
        "task_id": first.task_id,
        "group_id": first.group_id,
        "env": first.env,
        "purpose": first.purpose,
        "status": last.status,
        "stop_reason": last.stop_reason,
        "error": last.error,
        "complete": is_complete(held),
        "segments": [piece.segment.index for piece in held],
        "offset": first.offset,
        "temperature": first.temperature,
        "generators": list(dict.fromkeys(piece.segment.generator for piece in held)),
        "turns": _turns(held),
        "rewards": _named(reward for piece in held for reward in piece.segment.rewards),
        "marks": _named(mark for piece in held for mark in piece.segment.marks),
        "extra": {key: value for piece in held for key, value in piece.segment.extra.items()},
        **{name: [x for part in arrays if name in part for x in part[name].tolist()] for name in names},
    }


def _turns(held: list[PlacedSegment]) -> list[dict[str, Any]]:
    # A turn that is cut into several segments ends in the last of them and starts in the first.
    turns = {turn.index: turn for piece in held for turn in piece.segment.turns}
    starts = {turn.index: turn.start for piece in reversed(held) for turn in piece.segment.turns}
    return [
        {
            "index": turn.index,
            "start": starts[turn.index],
            "end": turn.end,
            "action": turn.action,
            "back": turn.back,
        }
        for turn in sorted(turns.values(), key=lambda turn: turn.index)
    ]


def _named(values: Iterable[Reward | TurnMark]) -> list[dict[str, Any]]:
    return [{"name": value.name, "turn": value.turn, "value": value.value} for value in values]


# --- safetensors --------------------------------------------------------------------------------------------


def write_safetensors(folder: Path, found: dict[str, list[PlacedSegment]], file: IO[bytes]) -> None:
    """Write each array of each segment as `TRAJECTORY/INDEX/NAME`, the widest types first to align all."""
    tensors = [
        (f"{name}/{piece.segment.index}/{spec.name}", piece, spec)
        for name, held in found.items()
        for piece in held
        for spec in piece.segment.arrays
    ]
    tensors.sort(key=lambda tensor: -int(tensor[2].dtype[1:]))
    header, _ = layout({name: (DTYPES[spec.dtype], (spec.length,)) for name, _, spec in tensors})
    file.write(header)
    for data in _data(folder, [(piece, spec.name) for _, piece, spec in tensors]):
        file.write(data)


def _data(folder: Path, wanted: list[tuple[PlacedSegment, str]]) -> Iterator[bytes]:
    place, arrays = None, Arrays()
    for piece, name in wanted:
        if piece.place != place:
            place, arrays = piece.place, _arrays(folder, piece)
        yield np.ascontiguousarray(arrays[name]).tobytes()
