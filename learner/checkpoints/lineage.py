"""The starting point of a learner process: its epoch, its lineage of checkpoints, the steps already done."""

import logging
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoints import checkpoint_files
from learner.run_files import CHECKPOINTS, next_epoch, read_number, write_number

log = logging.getLogger(__name__)

LINEAGE_FILE = "lineage"
"""File in the run folder that holds the lineage of the last learner."""


@dataclass(frozen=True)
class Start:
    """Where a learner process starts; known before its model is loaded, and sent to the broker on joining."""

    epoch: int
    """Number of this learner process in the run."""
    lineage: int
    """Epoch of the learner that began this line of checkpoints."""
    step: int = 0
    """Learner steps that the checkpoint covers; 0 without one."""
    restores: bool = False
    """True if there is a checkpoint to continue from."""
    again: bool = False
    """True if the run is resumed: an earlier learner may have left files."""
    stepped_back: bool = False
    """True if the checkpoint was put in force by `step_back`, so that a lower step than before is meant."""

    @property
    def continues(self) -> bool:
        """Whether the broker may hold tasks of this lineage that an earlier process put."""
        return self.lineage != self.epoch


def start(run_dir: Path, *, resume: bool, lockstep: bool) -> Start:
    """Count up the epoch, and find the checkpoint and the lineage that this process continues.

    In lockstep, tasks that were sampled before the restart must not be trained. So a restart begins a new
    lineage, and the broker cancels the tasks of the former one. A new lineage also begins if the checkpoint
    belongs to a different lineage than the last learner did, or if the run went back to it on purpose.

    Raises:
        CheckpointError: the newest checkpoint cannot be read, or one of its files is damaged.
    """
    path, folder = run_dir / LINEAGE_FILE, run_dir / CHECKPOINTS
    before = read_number(path)
    verified = checkpoint_files.verify_latest(folder) if resume else True
    stored = checkpoint_files.standing(folder) if resume else None
    back = stored is not None and checkpoint_files.stepped_back(folder)
    if stored is not None and not verified:
        log.warning("the checkpoint of step %d has no checksums; its files are not verified", stored.step)
    epoch = next_epoch(run_dir)
    lineage = epoch
    if resume and not lockstep and not back:
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
        stepped_back=back,
    )
