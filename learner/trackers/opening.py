"""Opens the trackers of a run. Their packages are imported here and nowhere else, and only those that are asked for."""

import importlib
from collections.abc import Callable, Sequence
from typing import assert_never

from learner.settings.trackers import TrackerName
from learner.trackers.feed import FedSink
from learner.trackers.sink import Sink, TrackedRun
from learner.trackers.tensorboard import TensorBoardSink

TB = "tb"
"""Folder of TensorBoard's events in the run folder."""


def open_trackers(names: Sequence[TrackerName], run: TrackedRun) -> list[Sink]:
    """Return a sink for each tracker. Only TensorBoard's is written at once; each other one has a thread."""
    sinks: list[Sink] = []
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoardSink(run.folder / TB))
        else:
            sinks.append(FedSink(name, _opener(name, run)))
    return sinks


def _opener(name: TrackerName, run: TrackedRun) -> Callable[[], Sink]:
    """Return the function that opens a tracker.

    Its package is imported by the caller's thread, because threads that import at the same time may see half a module.
    """
    make: Callable[[TrackedRun], Sink]
    try:
        importlib.import_module(name)
        match name:
            case "wandb":
                from learner.trackers.wandb import WandbSink as make
            case "mlflow":
                from learner.trackers.mlflow import MlflowSink as make
            case "swanlab":
                from learner.trackers.swanlab import SwanlabSink as make
            case "trackio":
                from learner.trackers.trackio import TrackioSink as make
            case "tensorboard":
                raise AssertionError("TensorBoard needs no thread")
            case _:
                assert_never(name)
    except Exception as error:
        # A package that is broken or missing is a tracker that cannot be opened.
        return _raiser(error)
    return lambda: make(run)


def _raiser(error: Exception) -> Callable[[], Sink]:
    def fail() -> Sink:
        raise error

    return fail
