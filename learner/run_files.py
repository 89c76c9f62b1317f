"""Where a learner keeps what others look for: its pid, its epoch, its weights."""

import hashlib
from pathlib import Path

PID_FILE = "learner.pid"
"""In the run folder: pid of rank 0, for whoever wants to end the learner."""
SHARED_MEMORY = Path("/dev/shm")


def weights_folder(run_dir: Path) -> Path:
    """Where this run's versions live: shared memory when there is some, else the run folder."""
    if SHARED_MEMORY.is_dir():
        digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"offbeat-{run_dir.name}-{digest}"
    return run_dir / "weights"


def next_epoch(run_dir: Path) -> int:
    """Epoch of this learner's lineage: one more than the last learner of this run folder had."""
    path = run_dir / "epoch"
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    partial = path.with_suffix(".partial")
    partial.write_text(str(epoch))
    partial.rename(path)
    return epoch
