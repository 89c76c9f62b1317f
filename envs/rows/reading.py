"""Reads the rows of a data set, chooses the held-out ones, and orders the others in each epoch.

jsonl, json and csv are read here; parquet and hub data sets through the package `datasets`. The choice and the order
are equal in every process.
"""

import csv
import glob
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO, TypeVar

from envs.base import Split
from envs.errors import EnvError
from envs.messages import without_nulls
from envs.user_code import nearest, shown

HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
"""Name of a data set on the hub: NAME/NAME, NAME/NAME:SPLIT or NAME/NAME:CONFIG:SPLIT."""
INSTALL = "pip install datasets"
LONGEST_VALUE = 1 << 24
"""Most characters of a value in a CSV file."""


@dataclass(frozen=True)
class DataRow:
    """One row of a data set."""

    place: str
    """Where the row stands, for errors: ``train.jsonl:3``."""
    values: dict[str, Any]


def shown_name(name: str) -> str:
    """Return the name of a data set as a person would write it: a path relative to the working folder."""
    return shown(name) if Path(name).is_file() else name


def columns_of(rows: Sequence[DataRow]) -> list[str]:
    """Return the names of all columns, in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def read_rows(name: str, param: str) -> list[DataRow]:
    """Return the rows of a data set.

    Args:
        name: path that ends in .jsonl, .jsonl.gz, .json, .csv or .parquet, or the name of a data set on the hub.
        param: setting that names it, for errors.

    Raises:
        EnvError: there is no such file, it has no rows, or a line is not a row; the text has file and line.
    """
    path = Path(name)
    reader = next((read for ending, read in READERS.items() if name.lower().endswith(ending)), None)
    if reader is None:
        hub = HUB_NAME.fullmatch(name)
        if hub is None or path.exists():
            raise EnvError(
                f"{param} = {name!r}: rows are in a file that ends in {', '.join(READERS)}, or in a data set "
                "of the hub, such as openai/gsm8k:main:train"
            )
        rows = list(_hub(name, hub[1], hub[2], hub[3]))
    else:
        if not path.is_file():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise EnvError(
                f"{param}: no file {name}, neither from the working folder nor beside the run file"
                f"{nearest(path.name, siblings)}"
            )
        try:
            rows = list(reader(path))
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise EnvError(f"{shown(name)}: cannot be read as text ({error}); save it as UTF-8") from None
        except OSError as error:
            raise EnvError(f"{shown(name)}: cannot be read ({error.strerror})") from None
    if not rows:
        raise EnvError(f"{param}: {name} has no rows")
    return rows


def _jsonl(path: Path) -> Iterator[DataRow]:
    name = shown(str(path))
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise EnvError(f"{place}: not JSON ({error}); write one object on each line") from None
            yield _object(place, value)


def _json(path: Path) -> Iterator[DataRow]:
    name = shown(str(path))
    try:
        with _opened(path) as file:
            value = json.load(file)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise EnvError(
            f"{name}:{line}: not JSON ({error}); one object on each line is the format of .jsonl"
        ) from None
    if isinstance(value, dict) and list(value) == ["data"]:
        value = value["data"]
    if not isinstance(value, list):
        raise EnvError(f"{name}: expected a list of objects, found {_kind(value)}")
    for number, item in enumerate(value, 1):
        yield _object(f"{name}: row {number}", item)


def _csv(path: Path, separator: str = ",") -> Iterator[DataRow]:
    name = shown(str(path))
    # The module's own limit of 131,072 characters is for all its readers in this process; no row is that of a stranger.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_VALUE))
    with _opened(path, newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=separator)
        names = list(reader.fieldnames or [])
        if twice := [name for name in names if names.count(name) > 1]:
            raise EnvError(f"{name}:1: two columns are called {twice[0]!r}; rename one")
        try:
            for values in reader:
                place = f"{name}:{reader.line_num}"
                if None in values or None in values.values():
                    raise EnvError(
                        f"{place}: not as many values as the {len(names)} columns of line 1; quote values with commas"
                    )
                yield DataRow(place, dict(values))
        except csv.Error as error:
            raise EnvError(f"{name}:{reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[DataRow]:
    name = shown(str(path))
    package = _datasets(str(path))
    try:
        # The package knows a file again by its size and time. The name of a configuration is part of the place of its
        # cache, so it is made from the content here.
        with open(path, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        # The package takes the name of a file for a pattern.
        table = package.load_dataset("parquet", digest[:16], data_files=glob.escape(str(path)), split="train")
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise EnvError(f"{name}: cannot be read as parquet ({type(error).__name__}: {said})") from None
    return (DataRow(f"{name}: row {number}", _of_table(values)) for number, values in enumerate(table, 1))


def _hub(name: str, repository: str, first: str | None, second: str | None) -> Iterator[DataRow]:
    package = _datasets(name)
    config, split = (first, second) if second else (None, first or "train")
    try:
        table = package.load_dataset(repository, config, split=split)
    except Exception as error:
        raise EnvError(
            f"the hub gives no data set {name!r} ({' '.join(str(error).split())[:300]}); it is written "
            "NAME/NAME:SPLIT or NAME/NAME:CONFIG:SPLIT"
        ) from None
    return (DataRow(f"{name}: row {number}", _of_table(values)) for number, values in enumerate(table, 1))


def _of_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table's row. A table gives each message the keys of all, so those without a value go."""
    return {
        column: without_nulls(value)
        if isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value)
        else value
        for column, value in values.items()
    }


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise EnvError(f"{name} needs the package datasets, which is not installed; run: {INSTALL}") from None
    return datasets


def _tsv(path: Path) -> Iterator[DataRow]:
    return _csv(path, "\t")


def _opened(path: Path, newline: str | None = None) -> TextIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return open(path, encoding="utf-8-sig", newline=newline)


def _object(place: str, value: Any) -> DataRow:
    if not isinstance(value, dict):
        raise EnvError(
            f'{place}: expected an object such as {{"prompt": "2+2", "answer": "4"}}, found {_kind(value)}'
        )
    return DataRow(place, value)


def _kind(value: Any) -> str:
    """Return the name of a JSON value's type.

    Example:
        >>> _kind([1]), _kind("a"), _kind(None), _kind(1.5)
        ('a list', 'a text', 'null', 'a number')
    """
    kinds: dict[type, str] = {list: "a list", str: "a text", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number")


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".ndjson": _jsonl,
    ".ndjson.gz": _jsonl,
    ".json.gz": _json,
    ".tsv": _tsv,
}
"""Function that reads a file, by the ending of its name."""


T = TypeVar("T")

ROUNDS = 8
"""Rounds of the network that permutes rows; four make a permutation that looks random (Luby and Rackoff, 1988)."""


def is_heldout(prompt: Any, share: float) -> bool:
    """Return whether a row is held out, by a hash of its prompt.

    The choice depends on nothing but the prompt and the share, so new rows and another order change nothing.
    Rows with equal prompts are on one side.

    Args:
        prompt: the prompt of the row, a text or messages.
        share: share of the prompts that is held out, 0 to 1.

    Example:
        >>> [is_heldout(f"What is {i} + 1?", 0.25) for i in range(6)].count(True), is_heldout("a", 0.0)
        (1, False)
    """
    return _hashed_number(key_of(prompt)) < share * 2**64


def divided(
    things: Sequence[T], share: Any, prompt_of: Callable[[T], Any], cure: str
) -> tuple[list[T], list[T]]:
    """Return the things that are trained, and those that are held out by a share of their prompts.

    Args:
        share: ``params.heldout``, not checked yet.
        cure: what to write there instead, for the error, up to the word "share" and what it is a share of.

    Raises:
        EnvError: the share is no number, below 0, or 1 and more.

    Example:
        >>> divided(["a", "b", "c"], 0.0, str, "name a file, or a share of the rows")
        (['a', 'b', 'c'], [])
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise EnvError(f"params.heldout = {share!r}: {cure}, at least 0 and below 1")
    sides = [is_heldout(prompt_of(thing), share) for thing in things]
    pairs = list(zip(things, sides, strict=True))
    return [thing for thing, held in pairs if not held], [thing for thing, held in pairs if held]


def key_of(prompt: Any) -> str:
    """Return a text that is equal for prompts that render equally, in whatever order their keys stand.

    Example:
        >>> key_of("Hi") == key_of([{"content": "Hi", "role": "user"}])
        True
    """
    if isinstance(prompt, list) and len(prompt) == 1 and prompt[0].keys() == {"role", "content"}:
        [message] = prompt
        prompt = message["content"] if message["role"] == "user" else prompt
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def position(index: int, rows: int, seed: int) -> tuple[int, int]:
    """Return the row and the epoch of a task. Every row comes once in each epoch.

    Args:
        index: index of the task, from 0 on without end.
        rows: number of rows, at least 1.
        seed: seed of the order. Each epoch has an order of its own.

    Example:
        >>> sorted(position(i, 4, seed=0)[0] for i in range(4, 8)), position(5, 4, seed=0)[1]
        ([0, 1, 2, 3], 1)
    """
    epoch, place = divmod(index, rows)
    return permuted(place, rows, f"{seed} {epoch}"), epoch


def index_of(row: int, rows: int, seed: int) -> int:
    """Return the index of the task that has a row in the first epoch: the inverse of `position`.

    Example:
        >>> [index_of(position(i, 5, seed=3)[0], 5, seed=3) for i in range(5)]
        [0, 1, 2, 3, 4]
    """
    return permuted(row, rows, f"{seed} 0", back=True)


def permuted(place: int, size: int, key: str, *, back: bool = False) -> int:
    """Return where a random permutation of ``range(size)`` sends a place, or with ``back`` where it comes from.

    A Feistel network permutes the numbers of an even number of bits. A result outside the range is permuted again, so
    that the range is mapped onto itself. So no process holds a list of all rows, and all agree.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in reversed(range(ROUNDS)) if back else range(ROUNDS):
            if back:
                left, right = right ^ (_hashed_number(f"{key} {turn} {left}") & mask), left
            else:
                left, right = right, left ^ (_hashed_number(f"{key} {turn} {right}") & mask)
        place = left << half | right
        if place < size:
            return place


def _hashed_number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def of_task(parts: Mapping[Split, Sequence[T]], index: int, split: Split, seed: int, what: str = "rows") -> T:
    """Return the row of a task: shuffled for each epoch in training, in order where it is held out.

    Args:
        parts: rows for training, and those that are held out.
        what: word for them in the error.

    Raises:
        EnvError: there are fewer held-out rows.

    Example:
        >>> of_task({"train": ["a"], "heldout": ["b", "c"]}, 1, "heldout", 0)
        'c'
    """
    rows = parts[split]
    if split == "train":
        return rows[position(index, len(rows), seed)[0]]
    if index >= len(rows):
        raise EnvError(
            f"held-out task {index}: there are {len(rows)} held-out {what}; lower learner.evaluation_tasks to "
            f"{len(rows)}"
        )
    return rows[index]
