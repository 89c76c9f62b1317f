"""Where a learner keeps what others look for: its pid, its epoch, its newest version, its checkpoints, its weights."""

import hashlib
import os
from pathlib import Path

PID_FILE = "learner.pid"
"""In the run folder: pid of rank 0, for whoever wants to end the learner."""
VERSION_FILE = "version"
"""In the run folder: the newest policy version that was written to be published."""
CHECKPOINTS = "checkpoints"
"""In the run folder."""
SHARED_MEMORY = Path("/dev/shm")


def weights_folder(run_dir: Path) -> Path:
    """Where this run's versions live: shared memory when there is some, else the run folder."""
    if SHARED_MEMORY.is_dir():
        digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"offbeat-{run_dir.name}-{digest}"
    return run_dir / "weights"


def next_epoch(run_dir: Path) -> int:
    """Epoch of this learner: one more than the last learner of this run folder had."""
    epoch = (read_number(run_dir / "epoch") or 0) + 1
    write_number(run_dir / "epoch", epoch)
    return epoch


def read_number(path: Path) -> int | None:
    """What `write_number` wrote; None where there is no file."""
    return int(path.read_text()) if path.exists() else None


def write_number(path: Path, number: int) -> None:
    """Put a number into a file; a crash leaves the one before, or this one, a power failure later on this one.

    An epoch that was given twice would make two processes one to the broker, and a version two sets of weights.
    """
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(str(number))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
