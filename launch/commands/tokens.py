"""Tokens out of a run: a line for each sampled token, with what the learner made of it, as JSON Lines or parquet.

`offbeat journal export --trained` joins the journal with the learner's annotations. `offbeat retrain --tokens` writes
the learner's own numbers while it trains the recorded steps again, in float32, bit for bit those of the loss.
"""

import importlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from broker.core.records import AnyEvent, Committed, LearnerJoined, UnitDropped, decode_event
from broker.journal.files import each_file
from broker.journal.writer import Kind
from launch import run_folder
from launch.commands.journal import PlacedSegment, arrays_of, trajectories
from launch.errors import LaunchError
from launch.view.inspector import Words, open_words
from learner.annotation_files import MASKED, Bit, Record, read_index, read_rows, records
from learner.given import GIVEN
from protocol import names
from protocol.files import whole_file

if TYPE_CHECKING:
    from learner.trajectory import Trajectory
    from learner.update.token_numbers import TokenNumbers

TRAINED = "trained"
WAITING = "waiting"
"""Outcome of a trajectory that has not ended, or that the learner has not taken yet."""
COLUMNS: dict[str, str] = {
    "trajectory": "string",
    "group": "string",
    "env": "string",
    "step": "int32",
    "outcome": "string",
    "position": "int32",
    "token": "int32",
    "text": "string",
    "version": "int32",
    "lag": "int32",
    "logp_behaviour": "float32",
    "logp_proximal": "float32",
    "logp_current": "float32",
    "ratio": "float32",
    "correction": "float32",
    "weight": "float32",
    "advantage": "float32",
    "entropy": "float32",
    "clipped": "bool",
    "truncated": "bool",
    "masked": "string",
    "origin": "string",
}
"""Columns and their types in parquet; docs/run/tokens.md says what each means. Null: nobody kept it."""
REASONS = {
    Bit.STALE: "lag",
    Bit.AUXILIARY: "auxiliary",
    Bit.ZERO_WEIGHT: "correction",
    Bit.UNUSED: "method",
}
"""Why a token carried no gradient, for each reason of `MASKED`."""
ROWS_AT_ONCE = 100_000
"""Rows of a group in a parquet file."""
_REASON = np.full(256, "", dtype=object)
for _bit in reversed(MASKED):
    for _bits in range(256):
        if _bits & _bit:
            _REASON[_bits] = REASONS[_bit]

Table = Mapping[str, Sequence[Any]]
"""Columns by name, equally long. A column that is missing is null."""


class TokenWriter(Protocol):
    """Writes tables of tokens to a file."""

    rows: int

    def add(self, table: Table, count: int) -> None: ...


class JsonLines:
    """Writes one JSON object a line. A float32 is written so that it is read back bit for bit."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self.rows = 0

    def add(self, table: Table, count: int) -> None:
        columns = [table.get(name) or [None] * count for name in COLUMNS]
        for row in zip(*columns, strict=True):
            self._file.write(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n")
        self.rows += count

    def close(self) -> None:
        self._file.close()


class Parquet:
    """Writes a parquet file with pyarrow.

    Raises:
        LaunchError: pyarrow is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise LaunchError(
                f"{path.name}: a parquet file needs pyarrow ({error}); pip install pyarrow, or write .jsonl"
            ) from None
        self._arrow = arrow
        self._schema = arrow.schema([(name, _arrow_type(arrow, kind)) for name, kind in COLUMNS.items()])
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._waiting: list[Any] = []
        self._held = self.rows = 0

    def add(self, table: Table, count: int) -> None:
        columns = [
            self._arrow.array(table.get(name) or [None] * count, type=self._schema.field(name).type)
            for name in COLUMNS
        ]
        self._waiting.append(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self.rows += count
        self._held += count
        if self._held >= ROWS_AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            self._writer.write_table(self._arrow.concat_tables(self._waiting))
        self._waiting, self._held = [], 0

    def close(self) -> None:
        self._write()
        self._writer.close()


def _arrow_type(arrow: Any, kind: str) -> Any:
    return arrow.bool_() if kind == "bool" else getattr(arrow, kind)()


@contextmanager
def token_file(path: Path) -> Iterator[TokenWriter]:
    """Write a file of tokens, whole or not at all; its suffix decides on its form.

    Raises:
        LaunchError: the suffix is neither .jsonl nor .parquet, pyarrow is missing, or the file cannot be written.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise LaunchError(
            f"{path}: tokens are written as .jsonl or .parquet; give the file one of these endings"
        )
    try:
        with whole_file(path, shared=True) as partial:
            writer = JsonLines(partial) if path.suffix == ".jsonl" else Parquet(partial)
            try:
                yield writer
            finally:
                writer.close()
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None


def _numbers(values: NDArray[Any]) -> list[float | None]:
    """Return floats for a table; null where the learner kept none. A float32 keeps its bits."""
    return [value if math.isfinite(value) else None for value in values.astype(np.float64).tolist()]


def learned(rows: NDArray[Any], weight: NDArray[Any] | None = None) -> dict[str, list[Any]]:
    """Return the columns that come from annotations.

    Args:
        rows: rows of `learner.annotation_files.row_type`, [N].
        weight: share of each token in the loss, [N]; None: it was not kept.

    Example:
        >>> from learner.annotation_files import row_type
        >>> rows = np.zeros(2, row_type("float16"))
        >>> rows["bits"] = [Bit.TRAINED | Bit.CLIPPED, Bit.STALE]
        >>> [learned(rows)[name] for name in ("clipped", "masked")]
        [[True, False], ['', 'lag']]
    """
    bits = rows["bits"]
    columns: dict[str, list[Any]] = {
        name: _numbers(rows[name])
        for name in ("logp_proximal", "logp_current", "ratio", "correction", "advantage", "entropy")
    }
    columns |= {
        "lag": rows["lag"].tolist(),
        "clipped": ((bits & Bit.CLIPPED) > 0).tolist(),
        "truncated": ((bits & Bit.TRUNCATED) > 0).tolist(),
        "masked": _REASON[bits].tolist(),
    }
    return columns if weight is None else columns | {"weight": _numbers(weight)}


# --- from the journal ---------------------------------------------------------------------------------------


@dataclass
class Outcomes:
    """What became of trajectories, by the journal's events and the learner's annotations."""

    of_unit: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Outcome and step of units that the learner committed, or the broker dropped (step 0), in steps that stand."""
    of_trajectory: dict[str, str] = field(default_factory=dict)
    """The learner's own word for trajectories that it dropped, for example ``uniform``."""

    def add_event(self, event: AnyEvent) -> None:
        """Add an event of the journal."""
        match event:
            case LearnerJoined(hello=hello):
                # Steps behind its checkpoint are undone.
                self.of_unit = {unit: known for unit, known in self.of_unit.items() if known[1] <= hello.step}
            case Committed(step=step, trained=trained, dropped=dropped):
                self.of_unit |= dict.fromkeys(trained, (TRAINED, step))
                self.of_unit |= {unit: ("dropped", step) for unit in dropped if unit not in self.of_unit}
            case UnitDropped(unit_id=unit_id, outcome=outcome):
                self.of_unit[unit_id] = (outcome, 0)

    def of(self, trajectory_id: str) -> str:
        """Return the outcome of a trajectory that has no annotation."""
        if own := self.of_trajectory.get(trajectory_id):
            return own
        group = names.group_of_task(names.task_of(trajectory_id))
        found = [self.of_unit[unit][0] for unit in (trajectory_id, group) if unit in self.of_unit]
        return found[0] if found else WAITING


def read_outcomes(run: Path) -> Outcomes:
    """Read what became of the trajectories of a run.

    Raises:
        JournalError: there is no journal, or it cannot be read.
    """
    outcomes = Outcomes()
    for contents in each_file(run / run_folder.JOURNAL):
        for entry in contents.entries:
            if entry.kind is Kind.EVENT:
                outcomes.add_event(decode_event(contents.record(entry).payload))
    # Windows are units of their own: a trajectory is trained if one of its windows is.
    for unit, known in list(outcomes.of_unit.items()):
        name = names.without_window(unit)
        if name != unit and outcomes.of_unit.get(name, ("", 0))[0] != TRAINED:
            outcomes.of_unit[name] = known
    for step, _ in read_index(run):
        for outcome, ids in step.untrained.items():
            outcomes.of_trajectory |= dict.fromkeys(ids, outcome)
    return outcomes


def export_trained(run: Path, out: Path, only: Sequence[str] | None = None) -> str:
    """Write the sampled tokens of all training trajectories of a run, or of ``only`` some. Return a line about it.

    Raises:
        LaunchError: the file cannot be written, or the run has no annotations.
        JournalError: the journal cannot be read.
    """
    kept: dict[str, list[Record]] = {}
    for record in records(run):
        kept.setdefault(record.trajectory.trajectory_id, []).append(record)
    if not kept:
        raise LaunchError(
            f"{run}: the learner has kept no annotations there; it writes them behind each step, unless "
            "learner.annotations_mib is 0"
        )
    folder, outcomes, words = run / run_folder.JOURNAL, read_outcomes(run), run_words(run)
    counts: Counter[str] = Counter()
    with token_file(out) as writer:
        for held in trajectories(folder, only).values():
            if held[0].segment.purpose == "train":
                counts.update(_write_trajectory(writer, folder, held, kept, outcomes, words))
        of_files = (r for found in kept.values() for r in found if r.trajectory.token_ids)
        for record in of_files:
            if only is None or record.trajectory.trajectory_id in only:
                counts.update(_write_record_of_file(writer, record, words))
    parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"{out}: {writer.rows} tokens of {counts.total()} trajectories ({parts})"


def _write_trajectory(
    writer: TokenWriter,
    folder: Path,
    held: Sequence[PlacedSegment],
    kept: Mapping[str, Sequence[Record]],
    outcomes: Outcomes,
    words: Words,
) -> list[str]:
    """Write the tokens of a trajectory: for each step that trained a part of it, and those that none did."""
    segment = held[0].segment
    parts = [arrays_of(folder, piece) for piece in held]
    joined = {
        name: np.concatenate([part[name] for part in parts])
        for name in ("token_ids", "action_mask", "logp_behaviour", "policy_version")
    }
    first = segment.offset
    rest = np.flatnonzero(joined["action_mask"]) + first
    facts = (segment.trajectory_id, segment.group_id, segment.env)
    trained = False
    for record in kept.get(segment.trajectory_id, ()):
        rows = read_rows(record)
        position = record.trajectory.places
        here = (position >= first) & (position < first + len(joined["token_ids"]))
        if rows is None or not len(position):
            continue
        columns = sampled_columns(facts, position[here], joined, words, first=first)
        count = int(here.sum())
        writer.add(columns | learned(rows[here]) | _of_record(record, count), count)
        rest, trained = np.setdiff1d(rest, position), True
    outcome = TRAINED if trained else outcomes.of(segment.trajectory_id)
    if len(rest):
        columns = sampled_columns(facts, rest, joined, words, first=first)
        writer.add(columns | {"outcome": [outcome] * len(rest)}, len(rest))
    return [outcome]


def _write_record_of_file(writer: TokenWriter, record: Record, words: Words) -> list[str]:
    """Write the tokens of an answer that was read from a file in one step. The journal has none of it."""
    t, rows = record.trajectory, read_rows(record)
    if rows is None:
        return []
    tokens = len(t.token_ids)
    arrays = {
        "token_ids": np.array(t.token_ids, np.int32),
        "logp_behaviour": np.zeros(tokens, np.float32),
        "policy_version": np.full(tokens, -1, np.int32),
    }
    columns = sampled_columns((t.trajectory_id, t.group, GIVEN), t.places, arrays, words)
    writer.add(columns | learned(rows) | _of_record(record, t.rows), t.rows)
    return [TRAINED]


def _of_record(record: Record, count: int) -> dict[str, list[Any]]:
    facts = {"step": record.of.step, "outcome": TRAINED, "origin": record.trajectory.origin}
    return {name: [fact] * count for name, fact in facts.items()}


def sampled_columns(
    facts: tuple[str, str, str],
    position: NDArray[Any],
    arrays: Mapping[str, NDArray[Any]],
    words: Words,
    *,
    first: int = 0,
) -> dict[str, list[Any]]:
    """Return the columns that come from the actor.

    Args:
        facts: trajectory, group and environment.
        position: tokens of the trajectory, [N].
        arrays: its arrays by name, from token ``first`` on.
    """
    at = position - first
    ids = arrays["token_ids"][at].tolist()
    versions = arrays["policy_version"][at]
    # What a teacher wrote has neither a version nor a behaviour probability.
    logps = np.where(versions < 0, np.float32(np.nan), arrays["logp_behaviour"][at])
    return {
        **{name: [fact] * len(ids) for name, fact in zip(("trajectory", "group", "env"), facts, strict=True)},
        "position": position.tolist(),
        "token": ids,
        "text": [words.word(token) for token in ids],
        "version": [None if version < 0 else version for version in versions.tolist()],
        "logp_behaviour": _numbers(logps),
    }


def run_words(run: Path) -> Words:
    """Return the texts of a run's tokens, if its tokenizer is on this machine."""
    from launch.commands.retrain import configuration
    from launch.errors import ConfigError

    try:
        return open_words(run, configuration(run))
    except ConfigError:
        return open_words(run, None)


# --- from steps that are trained again ----------------------------------------------------------------------


class TrainedTokens:
    """A `learner.trainer.TokenSink` that writes the learner's numbers of each token to a file of tokens."""

    def __init__(self, writer: TokenWriter, words: Words) -> None:
        self._writer, self._words = writer, words

    def step(
        self,
        step: int,
        version: int,
        trajectories: "Sequence[Trajectory]",
        numbers: "TokenNumbers",
        *,
        applied: bool,
        untrained: Mapping[str, list[str]],
    ) -> None:
        """Write the action tokens of a batch."""
        from learner.annotations import rows_of

        rows, places = rows_of(trajectories, [numbers], "float32")
        weights = np.full(len(numbers.batch.token_ids), np.nan, dtype=np.float32)
        weights[numbers.place] = numbers.trained("weight")
        at = 0
        for t, place, start in zip(trajectories, places, numbers.batch.starts.tolist(), strict=False):
            if not place.rows:
                continue
            position = place.places
            arrays = {name: getattr(t, name) for name in ("token_ids", "logp_behaviour", "policy_version")}
            columns = sampled_columns(
                (t.trajectory_id, t.group_id, t.env), position, arrays, self._words, first=-t.moved
            )
            own = rows[at : at + place.rows]
            at += place.rows
            table = columns | learned(own, weights[start + position + t.moved])
            step_and_outcome: dict[str, list[Any]] = {
                "step": [step] * place.rows,
                "outcome": [TRAINED] * place.rows,
                "origin": [t.origin] * place.rows,
            }
            self._writer.add(table | step_and_outcome, place.rows)

    def settle(self) -> bool:
        """Return True, because each step is written at once."""
        return True

    def rewind(self, step: int) -> None:
        """Do nothing, because nothing is undone."""

    def close(self) -> None:
        """Do nothing, because the file is closed by who opened it."""
