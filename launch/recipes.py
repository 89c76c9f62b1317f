"""The run files that come with the program: what there is, what each needs, and where it is explained."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from launch.config import RunConfig, load
from launch.errors import ConfigError
from launch.method_rules import compares_members
from learner.algorithm_config import KlConvex, KlPenalty

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes"
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
        """Its documentation; none for a job that stands for no method."""
        page = DOCS / f"{self.name}.md"
        return page if page.exists() else None

    @property
    def source(self) -> str:
        """arXiv ids; empty for a job, and for a method of our own making."""
        return self.config.recipe.source if self.config.recipe else ""

    @property
    def needs(self) -> list[str]:
        """What the method costs beside a policy."""
        learner = self.config.learner
        algorithm, kl = learner.algorithm, learner.algorithm.kl
        greedy, bounded = algorithm.advantage.kind == "greedy", algorithm.surrogate.kind == "bounded"
        reference = isinstance(kl, KlConvex) or (isinstance(kl, KlPenalty) and kl.to == "reference")
        parts = {
            "critic": algorithm.critic is not None,
            "windows": learner.train_on == "windows",
            "groups": compares_members(learner) or greedy or bounded,
            "greedy answers": greedy,
            "replay": learner.replay is not None,
            "reference model": reference,
        }
        return [part for part, needed in parts.items() if needed]


def recipes(folder: Path = FOLDER) -> list[Recipe]:
    """All of a folder, by name.

    Raises:
        ConfigError: there are none, or one is wrong.
    """
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise ConfigError(
            f"{folder}: no run files there; recipes belong to the repository, not to the installed package: "
            "run from a clone (pip install -e)"
        )
    return [_recipe(path) for path in paths]


def find(name: str, folder: Path = FOLDER) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none.
    """
    path = folder / f"{name.removesuffix('.toml')}.toml"
    if not path.is_file():
        names = sorted(p.stem for p in folder.glob("*.toml"))
        near = difflib.get_close_matches(name, names, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
        raise ConfigError(f"no recipe {name!r}; {cure}")
    return _recipe(path)


def table(entries: list[Recipe]) -> str:
    """One line per recipe: name, needs, source, description."""
    rows = [("NAME", "NEEDS", "SOURCE (arXiv)", "WHAT IT DOES")]
    rows += [(r.name, ", ".join(r.needs) or "-", r.source or "-", r.description) for r in entries]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    return "\n".join(lines) + "\n"


def page(recipe: Recipe) -> str:
    """The file's own settings, what it needs, and where it is explained."""
    explained = recipe.page or DOCS / "README.md"
    facts = [
        f"# file:  {recipe.path}",
        f"# needs: {', '.join(recipe.needs) or 'nothing beside a policy'}",
        f"# docs:  {explained}",
    ]
    return recipe.path.read_text(encoding="utf-8").rstrip() + "\n\n" + "\n".join(facts) + "\n"


def _recipe(path: Path) -> Recipe:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return Recipe(path, first.removeprefix("#").strip(), load(path))
