"""The files of annotations, which say what the learner made of each token: their format, and the reading of them.

A step has one record for each trajectory of its batch: a row for each action token of the trained window, in order.
The journal has ids, log-probabilities and versions of the same tokens. Layout of ``run_dir/annotations``::

    00000001.bin    rows of all records, one behind the other, of the type `row_type` names
    00000001.idx    a line of JSON for each step: an `AnnotatedStep` with the place of each record

A step is in the ``.bin`` before it is in the ``.idx``, so no index names what a crash cut. The oldest files go, as a
whole, when all together are larger than the limit. `learner.annotations` makes the rows.
"""

import contextlib
from collections.abc import Callable, Iterator
from enum import IntFlag
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocol.files import write_whole

FOLDER = "annotations"
"""Folder of the annotations in the run folder."""
Floats = Literal["float16", "float32"]
FILES = 8
"""Number of files that the limit is divided into."""
MAX_LAG = 255


class Bit(IntFlag):
    """Facts of one token. A token without `TRAINED` carried no policy gradient, and one of the others says why."""

    TRAINED = 1
    """The policy's objective was formed of it."""
    CLIPPED = 2
    """The surrogate's bound cut its gradient."""
    TRUNCATED = 4
    """A bound of the correction cut its weight."""
    ZERO_WEIGHT = 8
    """The correction masked it: its weight is 0."""
    STALE = 16
    """Masked by lag: it lags more than `learner.max_policy_lag`, or `replay.max_policy_lag` if it is replayed."""
    AUXILIARY = 32
    """Masked by the environment: its turn is auxiliary."""
    UNUSED = 64
    """Masked by the method: for example a greedy baseline, or a token without an advantage."""
    OTHER_LOSS = 128
    """A critic or imitation learned from it."""


MASKED = (Bit.STALE, Bit.AUXILIARY, Bit.ZERO_WEIGHT, Bit.UNUSED)
"""Reasons why a token carried no policy gradient, the first that applies. `Bit.ZERO_WEIGHT` may stand beside
`Bit.TRAINED`: the objective was formed of the token, with the weight 0."""


NUMBERS = ("logp_current", "logp_proximal", "ratio", "correction", "advantage", "entropy")
"""Floats of a row. They are NaN where the learner did not compute them; the ratio is current / behaviour."""


@cache
def row_type(floats: Floats) -> np.dtype[Any]:
    """Return the type of a row: `Bit`s, the policy lag in versions (at most `MAX_LAG`), and `NUMBERS`.

    Half floats have three digits. float32 has the learner's own, for who has to compare them bit for bit.

    Example:
        >>> row_type("float16").itemsize, row_type("float32").itemsize
        (14, 26)
    """
    number = "<f2" if floats == "float16" else "<f4"
    return np.dtype([("bits", "u1"), ("lag", "u1"), *((name, number) for name in NUMBERS)])


class AnnotatedTrajectory(Struct, frozen=True, array_like=True):
    """One record: the rows of a trajectory in one step."""

    trajectory_id: str
    rows: int
    """Number of rows: the action tokens of the window."""
    window: int
    """First token of the window. Action tokens before it were trained in earlier windows, or not at all."""
    spans: list[tuple[int, int]]
    """Tokens [start, end) of the trajectory that the rows belong to, in order."""
    replayed: bool = False
    """True if it came from the replay table."""
    origin: str = "own"
    """How it came into the batch, see `learner.trajectory.Origin`; "own" in files of an earlier version, too."""
    group: str = ""
    """Group that it is a member of, if it was read from a file, so that the journal lacks it."""
    token_ids: list[int] = []
    """Its tokens, then; all that are not in `spans` are of the prompt or observations."""

    @property
    def places(self) -> NDArray[np.int64]:
        """Tokens of the trajectory that the rows belong to, [rows].

        Example:
            >>> AnnotatedTrajectory("t", 3, 0, [(4, 6), (9, 10)]).places.tolist()
            [4, 5, 9]
        """
        spans = [np.arange(start, end, dtype=np.int64) for start, end in self.spans]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)


class AnnotatedStep(Struct, frozen=True, kw_only=True):
    """A line of an index."""

    step: int
    version: int
    """Policy version that the step updated."""
    time: float
    """Wall clock, in seconds since 1970 (UTC)."""
    applied: bool
    """False if the optimizer skipped the step, because a gradient was not finite."""
    floats: Floats
    offset: int
    """Byte of the ``.bin`` at which the first record begins; the others follow."""
    trajectories: list[AnnotatedTrajectory]
    untrained: dict[str, list[str]] = {}
    """Trajectories that the learner dropped since the step before, by outcome, for example ``uniform``."""

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.trajectories)


class Record(NamedTuple):
    """A record and its place in the files."""

    of: AnnotatedStep
    trajectory: AnnotatedTrajectory
    path: Path
    offset: int


_line = msgspec.json.Decoder(AnnotatedStep)


# --- reading ------------------------------------------------------------------------------------------------


def read_index(run_dir: Path) -> Iterator[tuple[AnnotatedStep, Path]]:
    """Yield all steps with annotations and the file of their rows, the oldest first. The run may be going on."""
    for path in sorted((run_dir / FOLDER).glob("*.idx")):
        rows = path.with_suffix(".bin")
        try:
            lines, size = path.read_bytes().splitlines(), rows.stat().st_size
        except FileNotFoundError:
            # The learner has removed it meanwhile.
            continue
        for line in lines:
            step = _decoded(line)
            if step is not None and step.offset + step.rows * row_type(step.floats).itemsize <= size:
                yield step, rows


def _decoded(line: bytes) -> AnnotatedStep | None:
    try:
        return _line.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def records(run_dir: Path, trajectory_id: str | None = None) -> Iterator[Record]:
    """Yield all records, or those of one trajectory, which has one for each step that trained a part of it."""
    for step, path in read_index(run_dir):
        for record in records_of(step, path):
            if trajectory_id in (None, record.trajectory.trajectory_id):
                yield record


def records_of(step: AnnotatedStep, path: Path) -> Iterator[Record]:
    """Yield the records of a step, whose rows are in the file ``path``."""
    offset, size = step.offset, row_type(step.floats).itemsize
    for one in step.trajectories:
        yield Record(step, one, path, offset)
        offset += one.rows * size


def read_rows(record: Record) -> NDArray[Any] | None:
    """Return the rows of a record, as an array of `row_type`; None if their file is gone."""
    dtype = row_type(record.of.floats)
    try:
        with open(record.path, "rb") as file:
            file.seek(record.offset)
            data = file.read(record.trajectory.rows * dtype.itemsize)
    except FileNotFoundError:
        return None
    return np.frombuffer(data, dtype) if len(data) == record.trajectory.rows * dtype.itemsize else None


# --- files --------------------------------------------------------------------------------------------------


class AnnotationFiles:
    """The files of a folder. All methods belong to one thread at a time.

    Args:
        folder: made when the first step is added.
        limit: most bytes of all files together, indices included. The newest step stays, however large it is.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._sizes: dict[int, int] = {}
        """Bytes of each pair of files, by its number."""
        self._open: tuple[FileIO, FileIO] | None = None
        """Rows and index of the newest pair. They stay open, because opening takes longer than writing a small step."""
        self._look()
        if self._sizes:
            self._repair(max(self._sizes))

    def _look(self) -> None:
        numbers = sorted(int(path.stem) for path in self._folder.glob("*.idx") if path.stem.isdecimal())
        self._sizes = {
            number: sum(path.stat().st_size for path in self._paths(number) if path.exists())
            for number in numbers
        }

    def _paths(self, number: int) -> tuple[Path, Path]:
        name = self._folder / f"{number:08d}"
        return name.with_suffix(".bin"), name.with_suffix(".idx")

    def _rows_size(self, number: int) -> int:
        path, _ = self._paths(number)
        return path.stat().st_size if path.exists() else 0

    def add(self, step: AnnotatedStep, rows: bytes) -> None:
        """Add a step behind all others. Its ``offset`` is set here.

        Raises:
            OSError: the disk did not take it; a reader does not see the step.
        """
        newest = max(self._sizes, default=1)
        if self._sizes.get(newest, 0) > self._limit // FILES:
            self.close()
            newest += 1
        try:
            data, index = self._open = self._open or self._begin(newest)
            line = msgspec.json.encode(msgspec.structs.replace(step, offset=data.tell())) + b"\n"
            # Unbuffered, and the rows first: what a crash cuts is in no index.
            _write_all(data, rows)
            _write_all(index, line)
        except OSError:
            # A part of it may be there.
            self.close()
            self._repair(newest)
            raise
        self._sizes[newest] = self._sizes.get(newest, 0) + len(rows) + len(line)
        while len(self._sizes) > 1 and sum(self._sizes.values()) > self._limit:
            oldest = min(self._sizes)
            del self._sizes[oldest]
            self._remove(oldest)

    def _begin(self, number: int) -> tuple[FileIO, FileIO]:
        self._folder.mkdir(exist_ok=True)
        data, index = self._paths(number)
        # They stay open until `close`.
        return open(data, "ab", buffering=0), open(index, "ab", buffering=0)

    def close(self) -> None:
        """Close the files."""
        for file in self._open or ():
            file.close()
        self._open = None

    def _remove(self, number: int) -> None:
        # The index goes first, so that it never names rows that are gone.
        data, index = self._paths(number)
        index.unlink(missing_ok=True)
        data.unlink(missing_ok=True)

    def rewind(self, step: int) -> None:
        """Delete the annotations of the steps after ``step``."""
        self.close()
        for number in self._sizes:
            self._cut(number, lambda line: line.step <= step)
        self._look()

    def _repair(self, number: int) -> None:
        """Cut what a crash or a full disk left of a step that is not whole."""
        with contextlib.suppress(OSError):
            if self._paths(number)[1].exists():
                size = self._rows_size(number)
                self._cut(number, lambda line: _end(line) <= size)
            self._look()

    def _cut(self, number: int, keep: Callable[[AnnotatedStep], bool]) -> None:
        """Keep a file's steps up to the first that is not to be kept."""
        data, index = self._paths(number)
        content, kept, end = index.read_bytes(), list[bytes](), 0
        for line in content.splitlines(keepends=True):
            step = _decoded(line)
            if step is None or not line.endswith(b"\n") or not keep(step):
                break
            kept.append(line)
            end = _end(step)
        if not kept:
            self._remove(number)
            return
        if (left := b"".join(kept)) != content:
            write_whole(index, left)
        if data.stat().st_size > end:
            with open(data, "r+b") as file:
                file.truncate(end)


def _write_all(file: FileIO, content: bytes) -> None:
    """Write all of it: a disk that becomes full takes a part first, and raises only at the next call."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _end(step: AnnotatedStep) -> int:
    return step.offset + step.rows * row_type(step.floats).itemsize
