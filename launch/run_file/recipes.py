"""The run files that come with the program: their names, their needs, and the pages that explain them."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.run_file.load import MEANT, RECIPES_FOLDER, load, read, run_files
from launch.run_file.sections import RunConfig
from learner.rewards import needed_marks
from learner.settings.advantages import compares_members
from learner.settings.algorithm import KlConvex, KlPenalty
from learner.settings.selection import PopulationSelection, TaskList
from recipes import ONE_ALGORITHM

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "recipes"


@dataclass(frozen=True)
class Recipe:
    """One shipped run file."""

    path: Path
    description: str
    """The first line of the file, a comment."""
    config: RunConfig

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def page(self) -> Path | None:
        """Page of docs/ with a section that explains the recipe; None for a job that stands for no method."""
        heading = f"\n## {self.name}\n"
        pages = (path for path in sorted(DOCS.glob("*.md")) if heading in path.read_text(encoding="utf-8"))
        return next(pages, None)

    @property
    def source(self) -> str:
        """arXiv ids; empty for a job, and for a method that comes from no paper."""
        return self.config.recipe.source if self.config.recipe else ""

    @property
    def needs(self) -> list[str]:
        """Parts that the method needs in addition to a policy."""
        learner = self.config.learner
        algorithm, kl = learner.algorithm, learner.algorithm.kl
        greedy, bounded = algorithm.advantage.kind == "greedy", algorithm.surrogate.kind == "bounded"
        reference = isinstance(kl, KlConvex) or (isinstance(kl, KlPenalty) and kl.to == "reference")
        reference = reference or algorithm.balances_trajectories
        parts = {
            "critic": algorithm.critic is not None,
            "windows": learner.train_on == "windows",
            "groups": compares_members(learner.algorithm.advantage) or greedy or bounded,
            "greedy answers": greedy,
            "marks": any(needed_marks(learner)),
            "hints": learner.family is not None and learner.family.kind == "hint",
            "families": learner.family is not None,
            "tasks again": isinstance(learner.selection, TaskList),
            "instructions": isinstance(learner.selection, PopulationSelection),
            "replay": learner.replay is not None,
            "reference model": reference,
            "average policy": algorithm.siblings is not None,
            "teacher": algorithm.distillation is not None or learner.taught is not None,
        }
        return [part for part, needed in parts.items() if needed]


def recipes(folder: Path = RECIPES_FOLDER) -> list[Recipe]:
    """Return the recipes of a folder, sorted by name.

    Raises:
        ConfigError: there are no recipes, or one is wrong.
    """
    return [_recipe(path) for path in _run_files(folder).values()]


def find(name: str, folder: Path = RECIPES_FOLDER) -> Recipe:
    """Return the recipe of this name.

    Raises:
        ConfigError: there is no such recipe.
    """
    files = _run_files(folder)
    path = files.get(MEANT.get(name.lower(), name.removesuffix(".toml")))
    if path is None:
        near = difflib.get_close_matches(name, files, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(files)}"
        raise ConfigError(f"no recipe {name!r}; {cure}")
    return _recipe(path)


def table(entries: list[Recipe]) -> str:
    """Return a table with one line per recipe: name, needs, source, description."""
    rows = [("NAME", "NEEDS", "SOURCE (arXiv)", "WHAT IT DOES")]
    rows += [(r.name, ", ".join(r.needs) or "-", r.source or "-", r.description) for r in entries]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    return "\n".join(lines) + "\n"


def page(recipe: Recipe) -> str:
    """Return a recipe as a run file that extends nothing: its settings are merged over the files it extends.

    Comments at the top say what the recipe needs and where it is explained.
    """
    explained = f"{recipe.page}#{recipe.name}" if recipe.page else str(DOCS / "README.md")
    facts = [
        f"# {recipe.description}",
        f"# needs: {', '.join(recipe.needs) or 'nothing beside a policy'}",
        f"# docs:  {explained}",
        f"# file:  {recipe.path} (with comments)",
        *(
            f"# note:  one algorithm as shipped: {', '.join(group)}"
            for group in ONE_ALGORITHM
            if recipe.name in group
        ),
    ]
    return "\n".join([*facts, *_toml(read(recipe.path))]) + "\n"


def to_toml(settings: dict[str, Any]) -> str:
    """Return settings as the text of a run file.

    Example:
        >>> print(to_toml({"method": "bapo", "learner": {"steps": 9}}), end="")
        method = "bapo"
        <BLANKLINE>
        [learner]
        steps = 9
    """
    return "\n".join(_toml(settings)).lstrip("\n") + "\n"


def _toml(table: dict[str, Any], path: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a table: values first, then the tables that have their own heading."""
    nested = {key: value for key, value in table.items() if isinstance(value, dict) or _has_tables(value)}
    for key, value in table.items():
        if key not in nested:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in nested.items():
        name = [*path, key]
        heading = ".".join(map(_key, name))
        if isinstance(value, dict):
            yield from ("", f"[{heading}]") if set(map(type, value.values())) != {dict} else ()
            yield from _toml(value, name)
        else:
            for entry in value:
                yield from ("", f"[[{heading}]]", *_toml(entry, name))


def _has_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def _run_files(folder: Path) -> dict[str, Path]:
    paths = run_files(folder)
    if not paths:
        raise ConfigError(
            f"{folder}: no run files there; the installation is not whole, install offbeat again"
        )
    return paths


def _recipe(path: Path) -> Recipe:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return Recipe(path, first.removeprefix("#").strip(), load(path))
