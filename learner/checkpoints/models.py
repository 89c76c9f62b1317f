"""Models in Hugging Face format that a run writes before its end.

Layout below the run folder::

    models/step-000020/          every `learner.export_every` steps
    models/best-step-000030/     with the best of the evaluations so far
    models/step-000040.partial/  a model that is being written; renamed once all of it is there
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.checkpoints.checkpoint_files import PARTIAL

MODELS = "models"
"""Folder of these models in the run folder."""
_STEP, _BEST = "step-", "best-step-"
_OURS = re.compile(rf"({_STEP}|{_BEST})(\d+)({re.escape(PARTIAL)})?")


def step_model(run_dir: Path, step: int) -> Path:
    """Return the folder of the model that was written at a step because of `learner.export_every`."""
    return run_dir / MODELS / f"{_STEP}{step:06d}"


def best_model(run_dir: Path, step: int) -> Path:
    """Return the folder of the model that was written at a step because its evaluation was the best so far."""
    return run_dir / MODELS / f"{_BEST}{step:06d}"


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
        if partial or (int(step) != best if kind == _BEST else int(step) > newest):
            shutil.rmtree(path, ignore_errors=True)
