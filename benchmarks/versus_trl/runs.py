"""Input and result of a run of benchmarks/versus_trl/program.py, in the same form for both sides. Pure.

Each side notes when each step ended and how many tokens it trained, and when each trajectory's reward was
known. The functions below compute every compared figure from these two lists.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spec:
    """Specification of one run, for the process that makes it."""

    arm: str
    config: dict[str, Any]
    """The run file, seed included."""
    model: str
    """Folder of the first weights and the tokenizer."""
    folder: str
    """Folder for everything that the run writes."""
    steps: int
    seconds: float
    """Seconds after which no further step begins."""
    threads: int
    """OpenMP threads of each process."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Spec":
        return Spec(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Run:
    """Result of one run. Times are seconds since the first step began."""

    startup: float
    """Seconds from the start of the process until the first step."""
    steps: list[tuple[float, int]]
    """End of each step, and the action tokens it trained."""
    rewards: list[tuple[float, float]]
    """Time at which the trainer knew a trajectory's reward, and the reward."""
    phases: dict[str, float]
    """Mean seconds per step of each phase that the side reports."""
    notes: dict[str, Any]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def tokens_per_second(steps: Sequence[tuple[float, int]], *, settle: int = 3) -> float | None:
    """Return the trained tokens per second after the first ``settle`` steps, or None with too few steps.

    Example:
        >>> tokens_per_second([(5.0, 100), (6.0, 100), (7.0, 120), (8.0, 80)], settle=1)
        100.0
    """
    settle = min(settle, len(steps) - 1)
    if settle < 1:
        return None
    return sum(tokens for _, tokens in steps[settle:]) / (steps[-1][0] - steps[settle - 1][0])


def step_seconds(steps: Sequence[tuple[float, int]]) -> float | None:
    """Return the median time from the end of one step to the end of the next.

    Example:
        >>> step_seconds([(5.0, 100), (6.0, 100), (7.5, 120), (8.5, 80)])
        1.0
    """
    ends = [end for end, _ in steps]
    return statistics.median(np.diff(ends).tolist()) if len(ends) > 1 else None


def curve(rewards: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Return the mean time and the mean reward of each window of ``window`` consecutive trajectories.

    A point has the mean of the times and not the last one. Otherwise smoothing would delay the time at which
    a reward was earned, and these times are compared.

    Example:
        >>> curve([(1.0, 0.0), (1.0, 0.5), (3.0, 0.5), (3.0, 1.0)], 2)
        [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75)]
    """
    if len(rewards) < window:
        return []
    points = np.array(sorted(rewards, key=lambda point: point[0]))
    sums = np.cumsum(np.vstack([np.zeros(2), points]), axis=0)
    means = (sums[window:] - sums[:-window]) / window
    return [(round(float(t), 6), round(float(r), 6)) for t, r in means]


def seconds_to(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the time at which a curve first reaches a level, or None if it never does.

    Example:
        >>> seconds_to([(1.0, 0.25), (2.0, 0.5), (3.0, 0.75)], 0.5)
        2.0
    """
    return next((t for t, reward in points if reward >= level), None)


def ratio(theirs: Sequence[float | None], ours: Sequence[float | None]) -> list[float]:
    """Return theirs over ours for each seed for which both have a value.

    Example:
        >>> ratio([4.0, None, 9.0], [2.0, 1.0, 3.0])
        [2.0, 3.0]
    """
    pairs = zip(theirs, ours, strict=True)
    return [a / b for a, b in pairs if a is not None and b is not None]


def spread(values: Sequence[float | None], digits: int = 2, *, wanted: int = 0) -> str:
    """Return the median as text, with minimum and maximum in brackets, and the count if below ``wanted``.

    Example:
        >>> spread([1.0, 3.0, None, 2.0]), spread([1500.0], 0), spread([None]), spread([1.0], wanted=3)
        ('2.00 [1.00, 3.00]', '1,500', '-', '1.00 (1 of 3)')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{statistics.median(known):,.{digits}f}"
    if len(known) > 1:
        text += f" [{min(known):,.{digits}f}, {max(known):,.{digits}f}]"
    return text if len(known) >= wanted else f"{text} ({len(known)} of {wanted})"
