"""Where a learner keeps what others look for: its pid, its epoch, its newest version, its checkpoints, its weights."""

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from protocol.whole_files import write_whole

PID_FILE = "learner.pid"
"""In the run folder: pid of rank 0, for whoever wants to end the learner."""
PUBLISHED_FILE = "published.json"
"""In the run folder: see `PublishedVersion`."""
CHECKPOINTS = "checkpoints"
"""In the run folder."""
SHARED_MEMORY = Path("/dev/shm")


class PublishedVersion(Struct, frozen=True):
    """What a broker that loses its journal no longer knows, and generators may still serve."""

    version: int = 0
    """Newest policy version that was written to be announced."""
    line: tuple[tuple[int, int], ...] = ()
    """`protocol.version_line.VersionLine.forks` of it: each time a learner was set back."""


def weights_folder(run_dir: Path) -> Path:
    """Where this run's versions live: shared memory when there is some, else the run folder."""
    if SHARED_MEMORY.is_dir():
        digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"offbeat-{run_dir.name}-{digest}"
    return run_dir / "weights"


def next_epoch(run_dir: Path) -> int:
    """Epoch of this learner: one more than the last learner of this run folder had."""
    epoch = newest_epoch(run_dir) + 1
    write_number(run_dir / "epoch", epoch)
    return epoch


def newest_epoch(run_dir: Path) -> int:
    """Epoch of the last learner of this run folder; 0 where there was none."""
    return read_number(run_dir / "epoch") or 0


def read_number(path: Path) -> int | None:
    """What `write_number` wrote; None where there is no file."""
    return int(path.read_text()) if path.exists() else None


def write_number(path: Path, number: int) -> None:
    """Put a number into a file.

    An epoch that was given twice would make two processes one to the broker.
    """
    write_whole(path, str(number))


def read_published(run_dir: Path) -> PublishedVersion:
    """What was written last; nothing where there is no file."""
    path = run_dir / PUBLISHED_FILE
    return (
        msgspec.json.decode(path.read_bytes(), type=PublishedVersion) if path.exists() else PublishedVersion()
    )


def write_published(run_dir: Path, published: PublishedVersion) -> None:
    """Before anybody can serve it: a version given twice would be two sets of weights."""
    write_whole(run_dir / PUBLISHED_FILE, msgspec.json.encode(published))
