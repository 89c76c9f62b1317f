"""Reads the rows of a data set: jsonl, json and csv; parquet and hub data sets through the package `datasets`."""

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from envs.blame import shown
from envs.errors import EnvError
from envs.user_code import nearest

HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
"""Name of a data set on the hub: NAME/NAME, NAME/NAME:SPLIT or NAME/NAME:CONFIG:SPLIT."""
INSTALL = "pip install datasets"


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
        param: parameter that names it, for errors.

    Raises:
        EnvError: there is no such file, it has no rows, or a line is not a row; the text has file and line.
    """
    path = Path(name)
    reader = next((read for ending, read in READERS.items() if name.endswith(ending)), None)
    if reader is None:
        hub = HUB_NAME.fullmatch(name)
        if hub is None or path.exists():
            raise EnvError(
                f"params.{param} = {name!r}: rows are in a file that ends in {', '.join(READERS)}, or in a data set "
                "of the hub, such as openai/gsm8k:main:train"
            )
        rows = list(_hub(name, hub[1], hub[2], hub[3]))
    else:
        if not path.is_file():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise EnvError(
                f"params.{param}: no file {name}, neither from the working folder nor beside the run file"
                f"{nearest(path.name, siblings)}"
            )
        try:
            rows = list(reader(path))
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise EnvError(f"{shown(name)}: cannot be read as text ({error}); save it as UTF-8") from None
        except OSError as error:
            raise EnvError(f"{shown(name)}: cannot be read ({error.strerror})") from None
    if not rows:
        raise EnvError(f"params.{param}: {name} has no rows")
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
            except ValueError as error:
                raise EnvError(f"{place}: not JSON ({error}); write one object on each line") from None
            yield _object(place, value)


def _json(path: Path) -> Iterator[DataRow]:
    name = shown(str(path))
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise EnvError(
            f"{name}:{line}: not JSON ({error}); one object on each line is the format of .jsonl"
        ) from None
    if not isinstance(value, list):
        raise EnvError(f"{name}: expected a list of objects, found {_kind(value)}")
    for number, item in enumerate(value, 1):
        yield _object(f"{name}: row {number}", item)


def _csv(path: Path) -> Iterator[DataRow]:
    name = shown(str(path))
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
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
    table = _datasets(str(path)).load_dataset("parquet", data_files=str(path), split="train")
    name = shown(str(path))
    return (DataRow(f"{name}: row {number}", dict(values)) for number, values in enumerate(table, 1))


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
    return (DataRow(f"{name}: row {number}", dict(values)) for number, values in enumerate(table, 1))


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise EnvError(f"{name} needs the package datasets, which is not installed; run: {INSTALL}") from None
    return datasets


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return open(path, encoding="utf-8-sig")


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
}
"""Function that reads a file, by the ending of its name."""
