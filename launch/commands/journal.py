"""`offbeat journal`: shows, checks and exports the journal of a run's broker, as JSON Lines or safetensors.

All actions except `accept-loss` only read the journal, and may run while the broker is at work.
"""

import argparse
import json
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from broker.errors import JournalError
from broker.journal.claim import read_mark
from broker.journal.files import DAMAGED, Contents, each_file, numbers, read_place
from broker.journal.opening import accept_losses, survey
from broker.journal.writer import (
    FoundRecord,
    Kind,
    Loss,
    Place,
    arrival_of,
    file_name,
    unpack_dead_letter,
    unpack_segment,
)
from launch.arguments import EXPORT_FORMATS
from launch.errors import LaunchError
from launch.run_folder import JOURNAL
from protocol import names
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
    arrived: float | None = None
    """Seconds since 1970; None in a journal of an earlier version."""


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
            payload = contents.record(entry).payload
            try:
                segment = decode_segment(unpack_segment(payload)[0])
            except ProtocolError as error:
                raise JournalError(
                    f"{folder}, record {entry.number}: {error}; another version wrote it"
                ) from None
            if only is None or segment.trajectory_id in only:
                found.setdefault(segment.trajectory_id, {})[segment.index] = PlacedSegment(
                    segment, entry.place, arrival_of(payload)
                )
    return {name: [held[index] for index in sorted(held)] for name, held in found.items()}


def is_complete(held: list[PlacedSegment]) -> bool:
    """Return whether a trajectory has ended and none of its segments is missing."""
    return [piece.segment.index for piece in held] == list(range(len(held))) and held[
        -1
    ].segment.status != "unfinished"


def arrays_of(folder: Path, piece: PlacedSegment) -> Arrays:
    """Read the arrays of a segment.

    Raises:
        JournalError: it cannot be read.
    """
    try:
        return unpack_arrays(piece.segment.arrays, unpack_segment(read_place(folder, piece.place))[1])
    except ProtocolError as error:
        raise JournalError(f"{piece.segment.trajectory_id}[{piece.segment.index}]: {error}") from None


# --- JSON Lines ---------------------------------------------------------------------------------------------


def write_jsonl(folder: Path, found: dict[str, list[PlacedSegment]], file: IO[bytes]) -> None:
    """Write one line per trajectory: its fields, and its arrays with the segments joined."""
    for held in found.values():
        file.write(msgspec.json.encode(_line(held, [arrays_of(folder, piece) for piece in held])) + b"\n")


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
        "rewards": _values_by_name(reward for piece in held for reward in piece.segment.rewards),
        "marks": _values_by_name(mark for piece in held for mark in piece.segment.marks),
        "times": [msgspec.to_builtins(spent) for piece in held for spent in piece.segment.times],
        "arrived": [piece.arrived for piece in held],
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


def _values_by_name(values: Iterable[Reward | TurnMark]) -> list[dict[str, Any]]:
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
            place, arrays = piece.place, arrays_of(folder, piece)
        yield np.ascontiguousarray(arrays[name]).tobytes()


MAX_LINE = 200


def run(args: argparse.Namespace) -> int:
    """Run one action and return the exit code.

    Raises:
        LaunchError: there is no journal, or it cannot be read.
    """
    folder = args.run / JOURNAL
    try:
        # A journal whose only file is gone still has its mark, by which `verify` names the file.
        if not numbers(folder) and not read_mark(folder).file:
            raise LaunchError(f"{folder}: no journal there; name the folder of a run that has had a broker")
        match args.action:
            case "ls":
                sys.stdout.write(table(folder))
            case "show":
                lines = dead_letters(folder) if args.dead else shown(folder, args.trajectory, args.kind)
                newest = deque(lines, args.limit) if args.limit is not None else lines
                sys.stdout.writelines(f"{line}\n" for line in newest)
            case "verify":
                return verify(folder)
            case "accept-loss":
                lost = [f"accepted: {loss}" for loss in accept_losses(folder)]
                sys.stdout.writelines(f"{line}\n" for line in lost or ["nothing is damaged"])
            case _ if args.trained:
                from launch.commands.tokens import export_trained

                if args.format is not None:
                    raise LaunchError(
                        "--trained goes by the ending of --out, .jsonl or .parquet; leave --format out"
                    )
                sys.stdout.write(export_trained(args.run, args.out, args.trajectory) + "\n")
            case _:
                format_ = args.format or EXPORT_FORMATS[0]
                sys.stdout.write(export(folder, args.out, format_, args.trajectory) + "\n")
    except JournalError as error:
        raise LaunchError(str(error)) from None
    except BrokenPipeError:
        # The reader of the pipe stopped early. A closed standard error hides Python's complaint at exit.
        sys.stderr.close()
    return 0


# --- ls -----------------------------------------------------------------------------------------------------


def table(folder: Path) -> str:
    """Return a table with one line per file."""
    rows = [["FILE", "BYTES", *(kind.name for kind in Kind), "FIRST", "LAST", "NEEDED"]]
    found: dict[int, int] = {}
    named: set[int] = set()
    current = 0
    for contents in each_file(folder):
        found[contents.number] = len(contents.data)
        rows.append(_row(contents))
        for entry in contents.entries:
            if entry.kind is Kind.SNAPSHOT:
                current, named = contents.number, _needed_files(contents.record(entry).payload)
    for row, number in zip(rows[1:], found, strict=True):
        row.append("yes" if number >= current or number in named else "no")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    gone = ", others deleted" if numbers(folder, ".released") else ""
    return "\n".join(lines) + f"\n{len(found)} files, {sum(found.values())} bytes{gone}\n"


def _row(contents: Contents) -> list[str]:
    kinds = Counter(entry.kind for entry in contents.entries)
    ends = [str(contents.entries[i].number) for i in (0, -1)] if contents.entries else ["-", "-"]
    return [file_name(contents.number), str(len(contents.data)), *(str(kinds[kind]) for kind in Kind), *ends]


def _needed_files(payload: bytes) -> set[int]:
    """Return the files with segments that a snapshot still needs."""
    try:
        return {place[0] for _, place, *_ in msgspec.msgpack.decode(payload)["segments"]}
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return set()


# --- show ---------------------------------------------------------------------------------------------------


def shown(folder: Path, trajectory: str | None = None, kind: str | None = None) -> Iterator[str]:
    """Yield records as lines: number, kind, content. Both filters are optional."""
    for contents in each_file(folder):
        for item in contents.found:
            if isinstance(item, Loss):
                if kind is None and trajectory is None:
                    yield f"{'-':>9}  {'LOST':8}  {item}"
            elif kind in (None, item.kind.name.lower()):
                payload = contents.record(item).payload
                text = _text(item, payload, trajectory)
                if text is not None:
                    when = _time_of(item.kind, payload)
                    yield f"{item.number:>9}  {item.kind.name:8}  {when}{text}"


def _time_of(kind: Kind, payload: bytes) -> str:
    """Return when the journal took a record, in UTC; "" if the record does not say so."""
    at = None
    if kind is Kind.SEGMENT:
        at = arrival_of(payload)
    elif kind is Kind.EVENT:
        at = _event(payload).get("at")
    return f"{clock_text(at)}  " if isinstance(at, float) else ""


def clock_text(at: float) -> str:
    """Return a time of the wall clock in UTC, to the millisecond.

    Example:
        >>> clock_text(1.5), clock_text(float("inf"))
        ('1970-01-01T00:00:01.500Z', '?')
    """
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return "?"


def _text(entry: FoundRecord, payload: bytes, trajectory: str | None) -> str | None:
    """Return the content of a record, or None if it does not concern ``trajectory``."""
    match entry.kind:
        case Kind.SEGMENT:
            header, _ = unpack_segment(payload)
            try:
                segment = decode_segment(header)
            except ProtocolError as error:
                return f"of another version: {error}" if trajectory is None else None
            ids = (segment.trajectory_id, segment.task_id, segment.group_id)
            return _segment(segment) if trajectory in (None, *ids) else None
        case Kind.EVENT:
            event = _event(payload)
            if trajectory is not None and not _mentions(event, _ids(trajectory)):
                return None
            event.pop("at", None)
            return _cut(f"{event.pop('type', '?'):14}  {_json(event)}")
        case _ if trajectory is not None:
            return None
        case Kind.DEAD:
            letter = unpack_dead_letter(payload)
            return _cut(f"{letter.peer}  {letter.code}  {letter.reason}")
        case _:
            return f"{len(payload)} bytes"


def _segment(segment: Segment) -> str:
    reward = f"  reward {sum(r.value for r in segment.rewards):g}" if segment.rewards else ""
    return (
        f"{segment.trajectory_id}[{segment.index}]  {segment.tokens} tokens ({segment.action_tokens} sampled)  "
        f"{segment.status}{reward}  {segment.purpose} {segment.env}"
    ).rstrip()


def _event(payload: bytes) -> dict[str, Any]:
    try:
        event = msgspec.msgpack.decode(payload)
    except msgspec.MsgspecError as error:
        return {"type": "unreadable", "error": str(error)}
    return event if isinstance(event, dict) else {"type": "?", "value": event}


def _ids(trajectory: str) -> set[str]:
    """Return the ids of a trajectory (TASK.ATTEMPT), its task (GROUP.MEMBER) and its group.

    Example:
        >>> sorted(_ids("1g7.3.0"))
        ['1g7', '1g7.3', '1g7.3.0']
    """
    task = names.task_of(trajectory)
    return {trajectory, task, names.group_of_task(task)} - {""}


def _mentions(value: Any, ids: set[str]) -> bool:
    match value:
        case str():
            return value in ids or names.without_window(value) in ids
        case dict():
            return any(_mentions(inner, ids) for inner in value.values())
        case list():
            return any(_mentions(inner, ids) for inner in value)
    return False


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


def dead_letters(folder: Path) -> Iterator[str]:
    """Yield messages that could not be accepted, each with sender, reason and frames."""
    for contents in each_file(folder):
        for entry in contents.entries:
            if entry.kind is Kind.DEAD:
                letter = unpack_dead_letter(contents.record(entry).payload)
                frames = "".join(
                    f"\n{'':11}{len(frame)} bytes: {_cut(repr(frame))}" for frame in letter.frames
                )
                cut = letter.nbytes > sum(map(len, letter.frames))
                more = f"\n{'':11}cut, the message had {letter.nbytes} bytes" if cut else ""
                yield f"{entry.number:>9}  {letter.peer}  {letter.code}: {letter.reason}{frames}{more}"


# --- verify -------------------------------------------------------------------------------------------------


def verify(folder: Path) -> int:
    """Check all files and print the findings. Return 1 if something is damaged or missing, else 0."""
    found = survey(folder)
    # Listed after the survey, so that files which the broker released meanwhile do not count as lost.
    released = set(numbers(folder, ".released"))
    losses = [loss for loss in found.losses if loss.file not in released]
    accepted = [loss for loss in found.accepted if loss.file not in released]
    lines = [f"damaged: {loss}" for loss in losses] + [f"damaged, and accepted: {loss}" for loss in accepted]
    if found.torn is not None:
        lines.append(f"torn end, which the broker is still writing, or cuts when it starts: {found.torn}")
    lines += [f"not begun in full, the broker sets it aside: {file_name(number)}" for number in found.unbegun]
    lines += [
        f"set aside by a repair: {path.name}, {path.stat().st_size} bytes"
        for path in sorted(folder.glob(f"*{DAMAGED}"))
    ]
    verdict = "damaged" if losses or accepted else "whole"
    lines.append(f"{folder}: {len(found.files)} files, {sum(found.files.values())} bytes, {verdict}")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if losses or accepted else 0
