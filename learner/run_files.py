"""Files of the learner in its run folder: places that others read, the lineage of its checkpoints, exported models.

Layout of the models below the run folder::

    models/step-000020/          every `learner.export_every` steps
    models/best-step-000030/     with the best of the evaluations so far
    models/step-000040.partial/  a model that is being written; renamed once all of it is there
"""

import hashlib
import json
import logging
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from learner import checkpoint_files
from learner.checkpoint_files import PARTIAL
from protocol.files import write_whole

log = logging.getLogger(__name__)

PID_FILE = "learner.pid"
"""File in the run folder: pid of rank 0, for a process that wants to end the learner."""
PUBLISHED_FILE = "published.json"
"""File in the run folder that holds a `PublishedVersion`."""
RESULT = "result.json"
"""File in the run folder that the learner writes at the end of its work."""
BEGAN = "began"
"""File in the run folder: when the last learner process began, in seconds since 1970."""
METRICS = "metrics.jsonl"
"""File in the run folder with a line of figures for each step."""
ADAPTER_FOLDER = "adapter"
"""Folder in an exported model: the adapters that are merged into it, for PEFT (`learner.lora`)."""
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


def says_over(run_dir: Path) -> bool:
    """Return whether the learner's result says that the run is over, and not that it will be resumed."""
    try:
        content = json.loads((run_dir / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("run") == "over"


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
    write_whole(run_dir / BEGAN, f"{time.time():.3f}", durable=False)
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


def find_start(run_dir: Path, *, resume: bool, lockstep: bool) -> Start:
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


MODELS = "models"
"""Folder of these models in the run folder."""
BEST = "best-step-"
"""How the name of the best model's folder begins."""
_STEP = "step-"
_OURS = re.compile(rf"({_STEP}|{BEST})(\d+)({re.escape(PARTIAL)})?")


def step_model(run_dir: Path, step: int) -> Path:
    """Return the folder of the model that was written at a step because of `learner.export_every`."""
    return run_dir / MODELS / f"{_STEP}{step:06d}"


def best_model(run_dir: Path, step: int) -> Path:
    """Return the folder of the model that was written at a step because its evaluation was the best so far."""
    return run_dir / MODELS / f"{BEST}{step:06d}"


def write_model(folder: Path, save: Callable[[Path], None]) -> None:
    """Write a model so that its folder is there as a whole or not at all.

    Args:
        folder: its place; a model that is there is replaced.
        save: writes the model into the folder it is given, as `TrainingEngine.save_pretrained` does.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    save(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def score_of(evaluation: Mapping[str, Any]) -> float | None:
    """Return what evaluations are compared by: the accuracy or, where nothing says what is right, the mean return.

    Example:
        >>> score_of({"accuracy": 0.5, "return_mean": 2.0}), score_of({"accuracy": None, "return_mean": 2.0})
        (0.5, 2.0)
    """
    accuracy: float | None = evaluation["accuracy"]
    mean: float | None = evaluation["return_mean"]
    return mean if accuracy is None else accuracy


def best_of(evaluations: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Return the best evaluation of a set after the first step, the earliest of equal ones; None without one.

    Args:
        evaluations: those of all sets, in their order.
        name: name of the set.

    Example:
        >>> seen = [{"set": "", "step": s, "accuracy": a, "return_mean": a} for s, a in ((0, 0.9), (5, 0.5), (10, 0.5))]
        >>> best_of(seen, "")["step"]
        5
    """
    scored = [(score, e) for e in _after_start(evaluations, name) if (score := score_of(e)) is not None]
    return max(scored, key=lambda scored: scored[0])[1] if scored else None


def _after_start(evaluations: Sequence[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    return (e for e in evaluations if e.get("set", "") == name and e["step"])


def with_model(run_dir: Path, evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluations whose model is kept as the best one of its time."""
    return [e for e in evaluations if e["step"] and best_model(run_dir, e["step"]).is_dir()]


def newest_is_best(run_dir: Path, evaluations: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether the newest evaluation of a set is better than those of all models that are kept."""
    *earlier, newest = [e for e in evaluations if e.get("set", "") == name]
    return best_of([*with_model(run_dir, earlier), newest], name) is newest


def remove_others(run_dir: Path, *, best: int | None, newest: int) -> None:
    """Delete models that this run does not know, or no longer needs.

    Args:
        best: step of the best model, the only one of its kind that stays; None: none stays.
        newest: the run's learner step. Later models are of steps that it does again.
    """
    for path in (run_dir / MODELS).glob("*"):
        if not (found := _OURS.fullmatch(path.name)):
            # Someone else put it there.
            continue
        kind, step, partial = found.groups()
        if partial or (int(step) != best if kind == BEST else int(step) > newest):
            shutil.rmtree(path, ignore_errors=True)
