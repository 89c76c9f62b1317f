"""Files of checkpoints, without torch: the pointer to the newest one, checksums, and going back to an earlier one.

Layout below the folder::

    latest                      name of the newest whole checkpoint; replaced by one rename
    stepped_back                name of the checkpoint that `step_back` put in force; obsolete once `latest` differs
    step00000012/checksums.json BLAKE3 hash and size of each file of the checkpoint
    step00000012/...            files of `learner.update.checkpoint` and of `learner.update.checkpoint`
    step00000018.partial/...    a checkpoint that is being written; renamed once all of it is on disk
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Struct

from learner.errors import CheckpointError
from protocol import files
from protocol.files import sync_file

LATEST = "latest"
STEPPED_BACK = "stepped_back"
CHECKSUMS = "checksums.json"
RANK_0 = "offbeat-rank0.msgpack"
PARTIAL = ".partial"
"""Ending of the folder of a checkpoint that is not whole."""

LARGE_BYTES = 64 << 20


class FileSum(Struct, frozen=True):
    """Size and hash of a file of a checkpoint."""

    nbytes: int
    blake3: str
    """Hash in hexadecimal digits."""


class _Counters(Struct):
    """The part of `learner.update.checkpoint.RankState` that places a checkpoint."""

    client: dict[str, Any]


class Standing(NamedTuple):
    """Step and lineage of a checkpoint."""

    step: int
    """Learner steps that the checkpoint covers."""
    lineage: int


def standing(folder: Path) -> Standing | None:
    """Return step and lineage of the newest whole checkpoint, from rank 0's file; None if there is none.

    Raises:
        CheckpointError: the newest checkpoint cannot be read.
    """
    if not (folder / LATEST).exists():
        return None
    return standing_of(folder, latest_name(folder))


def standing_of(folder: Path, name: str) -> Standing:
    """Return step and lineage of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / name / RANK_0
    try:
        client = msgspec.msgpack.decode(path.read_bytes(), type=_Counters).client
        return Standing(client["step"], client["curriculum"]["lineage"])
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        what = f"it says nothing of {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: {what}; {cure(folder, name)}") from None


def cure(folder: Path, name: str) -> str:
    """Return what to do without the checkpoint of this name: the command that goes back, if there is another one."""
    steps = sorted(step for step, names in kept(folder).items() if names != [name])
    if not steps:
        return "there is no other checkpoint; start anew, without --resume"
    return f"go back to the checkpoint of step {steps[-1]} with `offbeat train RUN_FILE --resume --from {steps[-1]}`"


def kept(folder: Path) -> dict[int, list[str]]:
    """Return the names of all checkpoints whose step can be read, by their learner step, the oldest first.

    A step may have two: the second was written after an evaluation.
    """
    found: dict[int, list[str]] = {}
    for path in sorted(folder.glob("step*"), key=lambda path: path.stat().st_mtime_ns):
        if path.suffix == PARTIAL:
            continue
        try:
            counters = msgspec.msgpack.decode((path / RANK_0).read_bytes(), type=_Counters)
            found.setdefault(int(counters.client["step"]), []).append(path.name)
        except (OSError, msgspec.MsgspecError, KeyError):
            continue
    return found


def find(folder: Path, step: int) -> str:
    """Return the name of the newest checkpoint of a learner step whose checksums are right, or else of the oldest.

    Raises:
        CheckpointError: there is none; the text lists the steps that there are.
    """
    names = kept(folder)
    if step not in names:
        there = f"there are steps {', '.join(map(str, sorted(names)))}" if names else "there is none at all"
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; {there}")
    oldest, *newer = names[step]
    for name in reversed(newer):
        with contextlib.suppress(CheckpointError):
            if verify(folder, name):
                return name
    return oldest


def step_back(folder: Path, step: int) -> None:
    """Put an earlier checkpoint in force. The later ones are deleted when the next checkpoint is written.

    Raises:
        CheckpointError: there is no checkpoint of this step.
    """
    name = find(folder, step)
    # The mark comes first: without it, the broker refuses a learner that continues at a lower step.
    files.write_whole(folder / STEPPED_BACK, name)
    files.write_whole(folder / LATEST, name)


def stepped_back(folder: Path) -> bool:
    """Return whether the checkpoint in force was put there by `step_back`.

    The mark alone does not say so: a process may have died after it wrote the next checkpoint, and before it
    removed the mark.
    """
    mark = folder / STEPPED_BACK
    return mark.exists() and mark.read_text(encoding="utf-8").strip() == latest_name(folder)


def write_checksums(folder: Path) -> None:
    """Write size and hash of every file of a checkpoint into `CHECKSUMS`."""
    sums = {
        str(path.relative_to(folder)): sum_of(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / CHECKSUMS).write_bytes(msgspec.json.format(msgspec.json.encode(sums), indent=1))


def verify_latest(folder: Path) -> bool:
    """Verify the checkpoint in force, see `verify`. Return False if there is none.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    return (folder / LATEST).exists() and verify(folder, latest_name(folder))


def verify(folder: Path, name: str) -> bool:
    """Compare every file of a checkpoint with its checksum.

    Return False if the checkpoint has no checksums, because an earlier version of Offbeat wrote it.

    Raises:
        CheckpointError: a file is missing or damaged; the text names it, and the command that goes back.
    """
    path = folder / name / CHECKSUMS
    if not path.exists():
        return False
    try:
        sums = msgspec.json.decode(path.read_bytes(), type=dict[str, FileSum])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); {cure(folder, name)}") from None
    for file, expected in sums.items():
        try:
            damage = difference(expected, sum_of(folder / name / file))
        except OSError as error:
            damage = error.strerror or "cannot be read"
        if damage:
            raise CheckpointError(f"{folder / name / file}: damaged ({damage}); {cure(folder, name)}")
    return True


def difference(expected: FileSum, found: FileSum) -> str:
    """Return how a file differs from its checksum, or "".

    Example:
        >>> difference(FileSum(3, "aa"), FileSum(2, "bb"))
        '2 bytes, 3 were written'
    """
    if found.nbytes != expected.nbytes:
        return f"{found.nbytes} bytes, {expected.nbytes} were written"
    return "" if found.blake3 == expected.blake3 else "its BLAKE3 hash is not that of what was written"


def sum_of(path: Path) -> FileSum:
    """Return size and hash of a file.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    # Threads pay for large files only. A forked process must not use those that its parent started.
    hashed = blake3(max_threads=blake3.AUTO if size >= LARGE_BYTES else 1)
    hashed.update_mmap(path)
    return FileSum(size, hashed.hexdigest())


def write_whole(folder: Path, optimizer_steps: int, write: Callable[[str], None]) -> None:
    """Write a checkpoint and, once all of it is on disk, put it in force.

    Until then its folder has the ending `PARTIAL`, so that what a killed process leaves is not taken for a
    checkpoint. If writing fails, that folder is removed: on a full disk it would take space that the broker's
    journal needs.

    Args:
        folder: folder of all checkpoints.
        optimizer_steps: number that names the checkpoint's folder.
        write: writes all files into the folder of the name that it is given.
    """
    name = next_name(folder, optimizer_steps)
    partial = folder / f"{name}{PARTIAL}"
    # A killed process may have left it.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write(partial.name)
        write_checksums(partial)
        sync(partial)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(folder / name)
    sync_file(folder)
    mark_latest(folder, name)


def sync(folder: Path) -> None:
    """Sync every file below the folder to disk, and the directory entries too."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync_file(path)


def next_name(folder: Path, optimizer_steps: int) -> str:
    """Return an unused name for a new checkpoint, because an existing folder may be the newest whole one."""
    base = f"step{optimizer_steps:08d}"
    name, again = base, 0
    while (folder / name).exists():
        again += 1
        name = f"{base}-{again}"
    return name


def latest_name(folder: Path) -> str:
    """Return the name of the newest whole checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint in {folder} ({error.strerror}); start without resuming"
        ) from None


def mark_latest(folder: Path, name: str) -> None:
    """Point to a checkpoint that is completely written, and delete all others except the previous one."""
    previous = (folder / LATEST).read_text(encoding="utf-8").strip() if (folder / LATEST).exists() else ""
    files.write_whole(folder / LATEST, name)
    (folder / STEPPED_BACK).unlink(missing_ok=True)
    for other in folder.glob("step*"):
        if other.name not in (name, previous):
            shutil.rmtree(other, ignore_errors=True)
