"""Places of the learner's files that others read: pid, epoch, newest version, checkpoints, weights."""

import hashlib
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from protocol.files import write_whole

PID_FILE = "learner.pid"
"""File in the run folder: pid of rank 0, for a process that wants to end the learner."""
PUBLISHED_FILE = "published.json"
"""File in the run folder that holds a `PublishedVersion`."""
RESULT = "result.json"
"""File in the run folder that the learner writes at the end of its work."""
METRICS = "metrics.jsonl"
"""File in the run folder with a line of figures for each step."""
CHECKPOINTS = "checkpoints"
"""Folder of checkpoints in the run folder."""
SHARED_MEMORY = Path("/dev/shm")


class PublishedVersion(Struct, frozen=True):
    """The newest published version and its history, which a broker that lost its journal does not know.

    Generators may still serve that version.
    """

    version: int = 0
    """Newest policy version that was published; it is written here before it is announced."""
    line: tuple[tuple[int, int], ...] = ()
    """Its `protocol.version_line.VersionLine.forks`: one pair for each time a learner was set back."""


def weights_folder(run_dir: Path) -> Path:
    """Return the folder of this run's versions: in shared memory if there is some, else in the run folder."""
    if SHARED_MEMORY.is_dir():
        digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"offbeat-{run_dir.name}-{digest}"
    return run_dir / "weights"


def let_all_read(folder: Path) -> None:
    """Give every file of an exported model the mode of its config.json, which follows the umask.

    The weights are written through a temporary file that only its owner may read.
    """
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


def next_epoch(run_dir: Path) -> int:
    """Count up the epoch of this run folder and return it: the number of this learner process."""
    epoch = newest_epoch(run_dir) + 1
    write_number(run_dir / "epoch", epoch)
    return epoch


def newest_epoch(run_dir: Path) -> int:
    """Return the epoch of the last learner of this run folder; 0 if there was none."""
    return read_number(run_dir / "epoch") or 0


def read_number(path: Path) -> int | None:
    """Return what `write_number` wrote; None if there is no file."""
    return int(path.read_text()) if path.exists() else None


def write_number(path: Path, number: int) -> None:
    """Write a number to a file, with one atomic rename.

    The epoch must not be lost in a crash: the broker would take two processes with one epoch for the same
    one.
    """
    write_whole(path, str(number))


def read_published(run_dir: Path) -> PublishedVersion:
    """Return what was written last; the default `PublishedVersion` if there is no file."""
    path = run_dir / PUBLISHED_FILE
    return (
        msgspec.json.decode(path.read_bytes(), type=PublishedVersion) if path.exists() else PublishedVersion()
    )


def write_published(run_dir: Path, published: PublishedVersion) -> None:
    """Write the newest version, before any generator can serve it.

    A learner that did not know of it could give its number to other weights.
    """
    write_whole(run_dir / PUBLISHED_FILE, msgspec.json.encode(published))
