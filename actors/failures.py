"""Makes a `Failure` of an exception that ended an episode, and logs each distinct one once with its traceback."""

import logging
import traceback
from pathlib import Path
from types import CodeType

import msgspec

from actors.errors import ActorError, EnvironmentFailed, Infrastructure, TeacherFailed
from envs.user_code import place, shown
from protocol.failures import MAX_KINDS, FailureCounts, describe
from protocol.messages.episodes import Failure
from protocol.messages.fields import MAX_FAILURE_TEXT, MAX_NAME, MAX_PLACE

log = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).parent)


def failure_of(error: BaseException) -> Failure:
    """Return the failure that an exception means: its class, its text on one line, and the line that raised it.

    An EnvironmentFailed with a cause stands for that cause. Other errors of actors have no class and no place,
    because their text says everything.

    Example:
        >>> try:
        ...     {}["answer"]
        ... except KeyError as error:
        ...     failure = failure_of(error)
        >>> failure.kind, failure.message, failure.fault
        ('KeyError', "'answer'", True)
    """
    error = _origin(error)
    if isinstance(error, ActorError):
        return Failure(message=_text(error), fault=not isinstance(error, Infrastructure | TeacherFailed))
    kind = type(error).__name__[:MAX_NAME]
    return Failure(kind=kind, message=_text(error), place=place_of(error)[-MAX_PLACE:])


def place_of(error: BaseException) -> str:
    """Return FILE:LINE of the innermost line of the environment's own code in a traceback, or "".

    The path is relative to the working directory if the file is below it.
    """
    codes = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # Actors call the environment, so what stands behind the last of their frames is the environment's.
    own = [i for i, (code, _) in enumerate(codes) if _is_ours(code)]
    codes = codes[own[-1] + 1 :] if own and own[-1] + 1 < len(codes) else codes
    path, _, line = place(codes).rpartition(" in ")[0].rpartition(":")
    if not path:
        return ""
    return f"{shown(path)}:{line}"


class FailureLog:
    """Log of failed episodes: a traceback for each distinct failure, and a count of the others.

    Example:
        >>> log_ = FailureLog()
        >>> log_.record(OSError("out of paper"), "1g0.0.0").message
        'out of paper'
    """

    def __init__(self) -> None:
        self._counts = FailureCounts()
        self._full = False

    def record(self, error: BaseException, trajectory_id: str) -> Failure:
        """Return the failure of an exception. Log it if it is new, or if its count is a power of ten."""
        failure = failure_of(error)
        # The runner names the trajectory, which would make each of its errors a distinct one.
        same = failure.message.replace(f" of {trajectory_id}", "")
        failure = msgspec.structs.replace(failure, message=same)
        seen = self._counts.add(failure)
        if seen == 1:
            log.warning(
                "episode %s failed: %s; failures like this are only counted from now on",
                trajectory_id, describe(failure), exc_info=_origin(error),
            )  # fmt: skip
        elif seen >= 10 and set(str(seen)[1:]) == {"0"} and str(seen)[0] == "1":
            log.warning("%d episodes failed: %s", seen, describe(failure))
        elif not seen and not self._full:
            self._full = True
            log.warning(
                "episode %s failed: %s; after %d distinct failures, others are not logged",
                trajectory_id, describe(failure), MAX_KINDS,
            )  # fmt: skip
        return failure


FAILURES = FailureLog()
"""Log of this process."""


def _origin(error: BaseException) -> BaseException:
    """Return the exception of user code for which an EnvironmentFailed stands, or the error itself."""
    stands_for = error.__cause__ if isinstance(error, EnvironmentFailed) else None
    return error if stands_for is None else stands_for


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return "its text cannot be shown"
    return " ".join(text.split())[:MAX_FAILURE_TEXT]


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)
