"""Finds what the run file names in a user's own code, and the line of it at which an error arose or a thread stands."""

import difflib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, CoroutineType, FrameType, ModuleType
from typing import Any

from envs.errors import EnvError, UnknownEnv

ROOT = Path(__file__).resolve().parents[1]
OWN = ("protocol", "broker", "envs", "actors", "learner", "launch")
"""Packages of Offbeat, in `ROOT`."""
LIBRARIES = tuple(
    Path(path).resolve()
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of the standard library and of installed packages."""


def is_library(filename: str) -> bool:
    """Return whether a file belongs to the standard library or an installed package, or is no file.

    Example:
        >>> is_library(traceback.__file__), is_library("<string>"), is_library("/home/me/my_task.py")
        (True, True, False)
    """
    if filename.startswith("<"):
        return True
    path = Path(filename).resolve()
    return "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in LIBRARIES)


def is_users(filename: str) -> bool:
    """Return whether a file is a user's code: neither of a library nor of Offbeat.

    Example:
        >>> is_users(__file__), is_users(traceback.__file__), is_users("/home/me/my_task.py")
        (False, False, True)
    """
    return not is_library(filename) and not any(
        Path(filename).resolve().is_relative_to(ROOT / package) for package in OWN
    )


def short_place(error: BaseException) -> str:
    """Return ``file:line`` of the innermost line of the user's code that an exception passed through.

    Without such a line it is the innermost line of all. A syntax error is in the file that it names.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{shown(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)] or list(frames)
    return f"{shown(own[-1].filename)}:{own[-1].lineno}" if own else ""


def shown(filename: str) -> str:
    """Return a path as a person would write it: relative to the current folder if it lies inside."""
    path, here = Path(filename).resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def in_one_line(error: BaseException, params: Mapping[str, Any] | None = None) -> str:
    """Return place, type and text of an exception, and the parameters whose values the text repeats.

    Args:
        params: parameters of the run file that the failing code was given.
    """
    text = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = f"no file {error.filename}"
    named = [
        f"params.{name}"
        for name, value in (params or {}).items()
        if isinstance(value, str) and len(value) > 1 and value in text
    ]
    where = short_place(error)
    parts = [where, type(error).__name__, text]
    return ": ".join(part for part in parts if part) + (f" ({', '.join(named)})" if named else "")


def place_of_thread(frame: FrameType | None) -> str:
    """Return the place at which a thread stands, from its innermost frame; "" if there is none.

    Args:
        frame: entry of the thread in ``sys._current_frames()``.
    """
    codes = list[tuple[CodeType, int]]()
    while frame is not None:
        codes.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return place(codes[::-1])


def place_of_coroutine(coroutine: Any) -> str:
    """Return the place at which a suspended coroutine waits; "" if it has ended.

    Example:
        >>> import asyncio
        >>> async def reset(): await asyncio.sleep(9)
        >>> waiting = reset()
        >>> place_of_coroutine(waiting).endswith(" in reset")
        True
        >>> waiting.close()
    """
    return place([(frame.f_code, frame.f_lineno) for frame in _awaited(coroutine)])


def place_of_error(error: BaseException) -> str:
    """Return the place at which an error was raised; "" if it has no traceback.

    Example:
        >>> try:
        ...     {}["answer"]
        ... except KeyError as error:
        ...     place_of_error(error).endswith("in <module>")
        True
    """
    codes, step = list[tuple[CodeType, int]](), error.__traceback__
    while step is not None:
        codes.append((step.tb_frame.f_code, step.tb_lineno))
        step = step.tb_next
    return place(codes)


def place(codes: Sequence[tuple[CodeType, int]]) -> str:
    """Return ``FILE:LINE in FUNCTION`` of the innermost line of a user's code, else of Offbeat's, else of all.

    Args:
        codes: code and line of each frame, the outermost first.
    """
    users = [at for at in codes if is_users(at[0].co_filename)]
    found = users or [at for at in codes if not is_library(at[0].co_filename)] or list(codes)
    if not found:
        return ""
    code, line = found[-1]
    return f"{code.co_filename}:{line} in {code.co_name}"


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    while isinstance(coroutine, CoroutineType):
        if coroutine.cr_frame is not None:
            yield coroutine.cr_frame
        coroutine = coroutine.cr_await


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
