"""Finds the line of a user's code in which an exception arose, or at which a thread or a coroutine stands."""

import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

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
