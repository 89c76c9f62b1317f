"""`offbeat journal`: shows, checks and exports the journal of a run's broker.

All actions except `accept-loss` only read the journal, and may run while the broker is at work.
"""

import argparse
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import JournalError
from broker.journal.claim import read_mark
from broker.journal.files import DAMAGED, Contents, each_file, numbers
from broker.journal.opening import accept_losses, survey
from broker.journal.records import FoundRecord, Kind, Loss, file_name, unpack_dead_letter, unpack_segment
from launch.commands.journal_export import export
from launch.errors import LaunchError
from launch.run_folder import JOURNAL
from protocol import names
from protocol.codec import decode_segment
from protocol.errors import ProtocolError
from protocol.messages.episodes import Segment

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
            case _:
                sys.stdout.write(export(folder, args.out, args.format, args.trajectory) + "\n")
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
                current, named = contents.number, _named(contents.record(entry).payload)
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


def _named(payload: bytes) -> set[int]:
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
                text = _text(item, contents.record(item).payload, trajectory)
                if text is not None:
                    yield f"{item.number:>9}  {item.kind.name:8}  {text}"


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
