"""Reads what the learner made of each token, from the files that it keeps beside its samples, and sums it up by lag."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.annotation_files import (
    FOLDER,
    MASKED,
    MAX_LAG,
    NUMBERS,
    AnnotatedStep,
    Bit,
    Record,
    read_index,
    read_rows,
    records_of,
    row_type,
)

COLUMNS = {"correction": "weight"}
"""Names of the page for numbers that are called differently in the files."""
WHY = {
    Bit.STALE: "masked: it lags more than the bound",
    Bit.AUXILIARY: "masked: the environment leaves its turn out of training",
    Bit.ZERO_WEIGHT: "masked: the correction gave it the weight 0",
    Bit.UNUSED: "masked by the method, for example because it has no advantage",
}
"""Why a token carried no policy gradient, for each reason of `MASKED`."""


@dataclass
class LagSums:
    """Sums over annotated tokens, by policy lag: arrays of `MAX_LAG` + 1 elements."""

    tokens: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    carried: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    """Tokens that carried gradient: formed of the objective, and not cut by a bound."""
    clipped: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    trained: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    ratio: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    ratios: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    weight: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_LAG + 1))

    def add(self, other: "LagSums") -> None:
        """Add the sums of another part."""
        for name in vars(self):
            getattr(self, name).__iadd__(getattr(other, name))

    def at(self, lag: int) -> dict[str, float | None]:
        """Return the means of one lag; None where nothing is known."""
        lag = min(lag, MAX_LAG)

        def mean(total: NDArray[np.float64], count: NDArray[np.float64]) -> float | None:
            return float(total[lag] / count[lag]) if count[lag] else None

        return {
            "ratio": mean(self.ratio, self.ratios),
            "clipped": mean(self.clipped, self.trained),
            "weight": mean(self.weight, self.weights),
            "carried": float(self.carried[lag]) if self.tokens[lag] else None,
        }


class _Seen(NamedTuple):
    step: AnnotatedStep
    path: Path
    sums: LagSums


class AnnotationReader:
    """Reads the annotations of one run. `refresh` is cheap if nothing has changed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stamp: tuple[tuple[str, int, int], ...] = ()
        self._seen: dict[tuple[str, int, int, float], _Seen] = {}
        self._records: dict[str, list[Record]] = {}
        self.reasons: dict[str, str] = {}
        """Why the learner did not train a trajectory, by its name."""
        self._of_files: dict[str, list[Record]] = {}
        """Records of answers that were read from a file, by group."""
        self.changes = 0

    def refresh(self) -> None:
        """Take what is new in the files; what was deleted or undone is forgotten."""
        stamp = tuple(
            (path.name, stat.st_size, stat.st_mtime_ns)
            for path, stat in _stats((self._run_dir / FOLDER).glob("*.idx"))
        )
        if stamp == self._stamp:
            return
        seen: dict[tuple[str, int, int, float], _Seen] = {}
        for step, path in read_index(self._run_dir):
            key = (path.name, step.offset, step.step, step.time)
            known = self._seen.get(key)
            seen[key] = known if known is not None else _Seen(step, path, lag_sums(step, path))
        self._stamp, self._seen = stamp, seen
        self.changes += 1
        self._records, self.reasons, self._of_files = {}, {}, {}
        for step, path, _ in seen.values():
            for record in records_of(step, path):
                self._records.setdefault(record.trajectory.trajectory_id, []).append(record)
                if record.trajectory.token_ids:
                    self._of_files.setdefault(record.trajectory.group, []).append(record)
            for outcome, names in step.untrained.items():
                self.reasons.update(dict.fromkeys(names, outcome))

    def origin(self, trajectory: str) -> str | None:
        """Return how a trajectory came into the newest batch that had it; None if nothing is kept."""
        self.refresh()
        found = self._records.get(trajectory)
        return found[-1].trajectory.origin if found else None

    def of_file(self, trajectory: str) -> Record | None:
        """Return the record of an answer that was read from a file; None if there is no such answer."""
        self.refresh()
        found = self._records.get(trajectory)
        return found[-1] if found and found[-1].trajectory.token_ids else None

    def of_files(self, group: str) -> list[Record]:
        """Return the records of the answers to a group's task that were read from a file."""
        self.refresh()
        return self._of_files.get(group, [])

    @property
    def sums(self) -> LagSums | None:
        """Sums over all annotated tokens that are kept; None if there are none."""
        if not self._seen:
            return None
        total = LagSums()
        for one in self._seen.values():
            total.add(one.sums)
        return total

    def of(self, trajectory: str, tokens: int) -> dict[str, NDArray[Any]] | None:
        """Return the annotations of a trajectory, one element per token; None if nothing is kept.

        Of several steps that trained a token, the newest counts, and one that replayed it only if there is no other.
        """
        self.refresh()
        found = self._records.get(trajectory)
        if not found:
            return None
        columns: dict[str, NDArray[Any]] = {
            COLUMNS.get(name, name): np.full(tokens, np.nan) for name in NUMBERS
        }
        columns["cut"] = np.full(tokens, None, dtype=object)
        for record in sorted(found, key=lambda record: (not record.trajectory.replayed, record.of.step)):
            rows = read_rows(record)
            if rows is None:
                continue
            places = record.trajectory.places
            kept = places < tokens
            for name in NUMBERS:
                columns[COLUMNS.get(name, name)][places[kept]] = rows[name][kept].astype(np.float64)
            columns["cut"][places[kept]] = [why_cut(int(bits)) for bits in rows["bits"][kept]]
        return columns


def _stats(paths: Iterable[Path]) -> Iterable[tuple[Path, Any]]:
    for path in sorted(paths):
        try:
            yield path, path.stat()
        except OSError:
            # The learner has removed it meanwhile.
            continue


def why_cut(bits: int) -> str | None:
    """Say where the gradient of a token was cut; None if it was carried whole.

    Example:
        >>> why_cut(Bit.TRAINED), why_cut(Bit.STALE)
        (None, 'masked: it lags more than the bound')
        >>> why_cut(Bit.TRAINED | Bit.CLIPPED)
        "clipped: the surrogate's bound cut its gradient"
        >>> why_cut(Bit.TRAINED | Bit.ZERO_WEIGHT | Bit.TRUNCATED)
        'masked: the correction gave it the weight 0'
    """
    masked = next((WHY[bit] for bit in MASKED if bits & bit), None)
    if masked or not bits & Bit.TRAINED:
        return masked or "masked"
    if bits & Bit.CLIPPED:
        return "clipped: the surrogate's bound cut its gradient"
    if bits & Bit.TRUNCATED:
        return "carried, with a weight that a bound of the correction cut"
    return None


def lag_sums(step: AnnotatedStep, path: Path) -> LagSums:
    """Return the sums of one step, without what was replayed, which has a bound of its own, and without what another
    policy wrote or was sampled behind another prompt, whose ratio is none.
    """
    sums, dtype = LagSums(), row_type(step.floats)
    try:
        with open(path, "rb") as file:
            file.seek(step.offset)
            rows = np.frombuffer(file.read(step.rows * dtype.itemsize), dtype)
    except FileNotFoundError:
        return sums
    other = [one.replayed or one.origin != "own" for one in step.trajectories]
    left_out = np.repeat(other, [one.rows for one in step.trajectories])
    rows = rows[~left_out[: len(rows)].astype(bool)]
    lag, bits = rows["lag"].astype(np.int64), rows["bits"]
    trained = bits & Bit.TRAINED > 0
    clipped = trained & (bits & Bit.CLIPPED > 0)

    def count(mask: NDArray[np.bool_], weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        chosen = None if weights is None else weights[mask]
        return np.bincount(lag[mask], chosen, MAX_LAG + 1).astype(np.float64)

    sums.tokens, sums.trained, sums.clipped = (
        count(np.ones(len(rows), np.bool_)),
        count(trained),
        count(clipped),
    )
    weighed = bits & Bit.ZERO_WEIGHT == 0
    # A step that the optimizer skipped moved nothing.
    sums.carried = count(trained & ~clipped & weighed) if step.applied else np.zeros(MAX_LAG + 1)
    for name, total, known in (("ratio", "ratio", "ratios"), ("correction", "weight", "weights")):
        values = rows[name].astype(np.float64)
        finite = trained & np.isfinite(values)
        setattr(sums, total, count(finite, values))
        setattr(sums, known, count(finite))
    return sums
