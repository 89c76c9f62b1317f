"""Where a learner process begins: its epoch, the line of checkpoints it continues, the steps that are done."""

import logging
from dataclasses import dataclass
from pathlib import Path

from learner import checkpoint
from learner.run_files import CHECKPOINTS, next_epoch, read_number, write_number

log = logging.getLogger(__name__)

LINEAGE_FILE = "lineage"
"""In the run folder, beside the epoch: the lineage of the last learner."""


@dataclass(frozen=True)
class Start:
    """What a learner says of itself to the broker, before its model is loaded."""

    epoch: int
    """Number of this process in the run."""
    lineage: int
    """Epoch with which the line of checkpoints began."""
    step: int = 0
    """Learner steps done, as far as they are in a checkpoint."""
    restores: bool = False
    """Whether there is a checkpoint to continue from."""
    again: bool = False
    """Whether an earlier learner of this run has left something."""

    @property
    def continues(self) -> bool:
        """Whether the broker may hold tasks of this lineage, put by the process before this one."""
        return self.lineage != self.epoch


def start(run_dir: Path, *, resume: bool, lockstep: bool) -> Start:
    """Count this process, and find what it continues.

    In lockstep, tasks that were sampled before the restart must not be trained: a new lineage begins with it,
    and the broker lets go of those of the former. So it does where a checkpoint belongs to another
    lineage than the last learner did.

    Raises:
        CheckpointError: the newest checkpoint cannot be read.
    """
    path = run_dir / LINEAGE_FILE
    before = read_number(path)
    stored = checkpoint.standing(run_dir / CHECKPOINTS) if resume else None
    epoch = next_epoch(run_dir)
    lineage = epoch
    if resume and not lockstep:
        if stored is None:
            lineage = epoch if before is None else before
        elif before in (None, stored.lineage):
            lineage = stored.lineage
    write_number(path, lineage)
    if resume and stored is None:
        log.warning("no checkpoint in %s: beginning again at step 0, lineage %d", run_dir, lineage)
    return Start(
        epoch=epoch,
        lineage=lineage,
        step=stored.step if stored else 0,
        restores=stored is not None,
        again=resume,
    )
