"""Finds what the run file names in a user's own code: ``module:attribute`` or ``path/to/file.py:attribute``."""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.blame import in_one_line
from envs.errors import EnvError, UnknownEnv


def load_callable(name: str, what: str, loaded: dict[str, ModuleType] | None = None) -> Callable[..., Any]:
    """Return the callable that a name of the run file means.

    Args:
        name: ``module:attribute`` or ``path/to/file.py:attribute``.
        what: words for errors, for example "environment".
        loaded: files that were loaded before, by path. Further files are added, so that each runs only once.

    Raises:
        UnknownEnv: there is no such module, file or callable; the message names the nearest one.
        EnvError: the module or file raised an exception when it was imported.
    """
    path, _, attribute = name.rpartition(":")
    module = _load_file(Path(path), what, loaded) if path.endswith(".py") else _load_module(path, name, what)
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise UnknownEnv(f"{what} {name!r}: {path} has no callable {attribute!r}{nearest(attribute, names)}")
    return found  # type: ignore[no-any-return]


def beside_run_file(path: str, folder: Path) -> str:
    """Return the path of a file that a run file names: in the working folder, else in the run file's folder.

    A file that is in neither is returned as it is named.

    Args:
        path: the path as the run file names it.
        folder: folder of the run file.

    Example:
        >>> beside_run_file("pyproject.toml", Path("docs")), beside_run_file("glossary.md", Path("docs"))
        ('pyproject.toml', 'docs/glossary.md')
    """
    beside = folder / path
    return path if Path(path).exists() or not beside.exists() else str(beside)


def code_beside_run_file(name: str, folder: Path, find: Callable[[str, Path], str] = beside_run_file) -> str:
    """Return a name of code, with the path of its file as ``find`` finds it; modules are left as they are."""
    path, colon, attribute = name.rpartition(":")
    return find(path, folder) + colon + attribute if path.endswith(".py") else name


def absolute_beside_run_file(path: str, folder: Path) -> str:
    """Return the path that `beside_run_file` finds as an absolute one, so that it holds in every working folder.

    Example:
        >>> absolute_beside_run_file("glossary.md", Path("docs")) == str(Path("docs/glossary.md").resolve())
        True
        >>> absolute_beside_run_file("nowhere.md", Path("docs"))
        'nowhere.md'
    """
    found = Path(beside_run_file(path, folder))
    return str(found.resolve()) if found.exists() else path


def code_file(text: object) -> str:
    """Return the file in ``path/to/file.py:name``, or "" if the text names a module or is none.

    Example:
        >>> code_file("a/rewards.py:exact"), code_file("rewards:exact")
        ('a/rewards.py', '')
    """
    path = text.rpartition(":")[0] if isinstance(text, str) else ""
    return path if path.endswith(".py") else ""


def code_files(params: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the files of the user's code that these parameters name.

    Example:
        >>> code_files({"parse": "game.py:parse", "observe": "game:observe"}, ("parse", "observe", "score"))
        ['game.py']
    """
    return [path for path in (code_file(params.get(name)) for name in names) if path]


def with_code_beside(params: dict[str, Any], names: Iterable[str], folder: Path) -> dict[str, Any]:
    """Return the parameters with absolute paths of these files, which are looked for beside the run file, too.

    Args:
        folder: folder of the run file.
    """
    found = dict(params)
    for name in names:
        if code_file(found.get(name)):
            found[name] = code_beside_run_file(found[name], folder, absolute_beside_run_file)
    return found


def nearest(word: str, choices: list[str]) -> str:
    """Return a question that names the nearest of the choices, or "" if none is near.

    Example:
        >>> nearest("promt", ["prompt", "answer"]), nearest("x", ["prompt"])
        ("; did you mean 'prompt'?", '')
    """
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _load_file(path: Path, what: str, loaded: dict[str, ModuleType] | None) -> ModuleType:
    if loaded is not None and str(path) in loaded:
        return loaded[str(path)]
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UnknownEnv(f"{what} file {path} does not exist{nearest(path.name, siblings)}")
    name = f"offbeat_env_{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownEnv(f"{what} file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickling look the module up by name.
    sys.modules[name] = module
    # Neighbours of the file are importable, as for a script that Python runs.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EnvError(in_one_line(error)) from error
    if loaded is not None:
        loaded[str(path)] = module
    return module


def _load_module(path: str, name: str, what: str) -> ModuleType:
    # Roles do not search the working folder first, lest a file there take the place of a library. Here it is the last.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(path)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (path == missing or path.startswith(missing + ".")):
            raise UnknownEnv(f"{what} {name!r}: no module {missing!r}; is it on PYTHONPATH?") from None
        raise EnvError(in_one_line(error)) from error
