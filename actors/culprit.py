"""Finds the line of user code at which a thread or a coroutine stands. Pure."""

from collections.abc import Iterator, Sequence
from types import CodeType, CoroutineType, FrameType
from typing import Any

from envs.blame import is_library, is_users


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
