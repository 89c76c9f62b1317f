"""What every tracker gets: records of the learner's report, and the run that they belong to."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from learner.samples import Sample, answer_of, escaped, prompt_of
from protocol.files import write_whole

TRACKER_ID = "tracker_id"
"""File in the run folder: the name of the run at its trackers, by which a resumed run goes on there."""
WALL_TIME = "wall_time"
"""Metric of trackers that stamp records themselves: seconds since 1970, UTC, at which the learner wrote the record."""


@dataclass(frozen=True)
class Scalars:
    """Numbers of one learner step or evaluation, by name."""

    step: int
    at: float
    """Wall clock of the record, in seconds since 1970, UTC. All kinds of records have it."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Histograms:
    """Finite values of one learner step, by tag; no array is empty."""

    step: int
    at: float
    values: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Text:
    """Markdown for a person: a note, or the table of failures."""

    step: int
    at: float
    name: str
    markdown: str


@dataclass(frozen=True)
class Samples:
    """What the model wrote at an evaluation."""

    step: int
    at: float
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Summary:
    """The learner's result at the end of the run, as in ``result.json``."""

    step: int
    at: float
    values: Mapping[str, Any]


Record = Scalars | Histograms | Text | Samples | Summary


class Sink(Protocol):
    """Writes records to one tracker."""

    def write(self, record: Record) -> None:
        """Write a record. A kind that the tracker has no place for is left out."""

    def rewind(self, step: int) -> None:
        """Prepare for records of steps after ``step``, which the run does again."""

    def close(self, *, failed: bool) -> None:
        """Write what is left, and close the run at the tracker; ``failed``: the learner ends with an error."""


@dataclass(frozen=True)
class TrackedRun:
    """The run, as trackers show it."""

    name: str
    """Name of the run folder."""
    folder: Path
    project: str = "offbeat"
    """Project or experiment that the run belongs to."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run file's settings, see `shown_config`."""

    def identity(self) -> str:
        """Return the name of the run at its trackers, made at the first call for its folder."""
        path = self.folder / TRACKER_ID
        try:
            return path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            write_whole(path, made := token_hex(8))
            return made


_SECRET = re.compile(
    r"(?:token|secret|password|passwd|api_?key|[_-]key|authorization|(?:^|[_-])auth|credential)s?$", re.I
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]*@")
"""User and password in a URL."""


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those whose name is that of a secret, because trackers show them to others.

    Only the environment's and the templates' tables can hold a user's secret; `[security]` holds places of keys and is
    left out as a whole.

    Example:
        >>> shown_config({"env": {"params": {"api_key": "abc", "sides": 6}}, "security": {"keys": "k"}})
        {'env': {'params': {'api_key': '(not shown)', 'sides': 6}}}
    """

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shown(str(key), inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [shown(name, inner) for inner in value]
        if not isinstance(value, str):
            return value
        return "(not shown)" if value and _SECRET.search(name) else _LOGIN.sub("(not shown)@", value)

    return {name: shown(name, value) for name, value in config.items() if name != "security"}


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables with dotted names; lists are leaves.

    Example:
        >>> dict(flat({"learner": {"optimizer": {"lr": 0.5}}, "steps": 3}))
        {'learner.optimizer.lr': 0.5, 'steps': 3}
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


SAMPLE_COLUMNS = (
    "step", "policy_version", "split", "evaluation", "chosen", "env", "task", "prompt", "answer", "return", "rewards",
    "correct", "advantage", "lag", "end",
)  # fmt: skip
"""Columns of the table of samples."""
CELL_CHARS = 4_000
"""Most characters of a cell."""


def sample_rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """Return samples as rows with the columns `SAMPLE_COLUMNS`. Texts are escaped, because models wrote them."""
    return [
        [
            s.step,
            s.policy_version,
            s.split,
            s.evaluation,
            s.chosen,
            s.env,
            s.task,
            escaped(prompt_of(s), keep="\n")[:CELL_CHARS],
            escaped(answer_of(s), keep="\n")[:CELL_CHARS],
            s.return_,
            json.dumps(s.rewards),
            s.correct,
            s.advantage,
            s.lag,
            escaped(s.failure if s.failed else s.end),
        ]
        for s in samples
    ]


def bins_of(values: NDArray[Any], bins: int = 64) -> tuple[list[int], list[float]]:
    """Return counts [bins] and edges [bins + 1] of finite values, in plain numbers.

    Example:
        >>> bins_of(np.array([0.0, 1.0, 1.0]), 2)
        ([1, 2], [0.0, 0.5, 1.0])
    """
    counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=bins)
    return counts.tolist(), edges.tolist()
