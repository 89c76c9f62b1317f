"""Finds the run files that come with the program by name, wherever it is installed."""

from pathlib import Path

import recipes

FOLDER = Path(recipes.__path__[0])
METHODS = FOLDER / "methods"


def run_files(folder: Path = FOLDER) -> dict[str, Path]:
    """Return the run files of a folder and of the folders in it, by name, sorted.

    Example:
        >>> run_files()["bapo"].relative_to(FOLDER).as_posix()
        'methods/bapo.toml'
    """
    return {path.stem: path for path in sorted(folder.rglob("*.toml"), key=lambda path: path.stem)}


def located(name: Path) -> Path:
    """Return the file of this name, or the shipped run file that is meant, or ``name`` if there is neither.

    A shipped run file is named without folder and ending, or as a file of recipes/, where all of them were once.

    Example:
        >>> located(Path("bapo")) == located(Path("recipes/bapo.toml")) == FOLDER / "methods" / "bapo.toml"
        True
        >>> located(Path("other/bapo.toml")).as_posix()
        'other/bapo.toml'
    """
    if name.is_file():
        return name
    bare = name.parent == Path() and not name.suffix
    was_there = name.parent.name == FOLDER.name and name.suffix == ".toml"
    return run_files().get(name.stem, name) if bare or was_there else name
