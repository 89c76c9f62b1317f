"""Names of the trackers that a run file may name; `learner.trackers` writes to them."""

import importlib.util
from collections.abc import Sequence
from typing import Literal

TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]
DEFAULT_TRACKERS: tuple[TrackerName, ...] = ("tensorboard",)


def missing_packages(names: Sequence[TrackerName]) -> list[TrackerName]:
    """Return the trackers whose package, which has the tracker's name, is not installed here.

    Example:
        >>> missing_packages(["tensorboard"])
        []
    """
    return [name for name in names if importlib.util.find_spec(name) is None]
