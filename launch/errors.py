"""Errors of starting and supervising, and the exit codes that tell whether another start could help.

LaunchError
├── ConfigError      the run file, or a combination in it, is wrong; nothing was started (final)
├── NotThereYet      the first host of a learner has not made the run folder
├── FolderInUse      another process holds the folder of a run or of a host (come back)
│   └── HostTaken    a host of this name is still at work here
├── RoleFailed       a process that the run needs has ended
├── RecordingError   a journal does not hold what was trained
├── NothingTrained   the run ended before its first step
├── TooSlow          too little happened to measure anything
├── NoAnswer         the broker did not return its status
│   ├── NoHead       the head has not answered a host since its start (come back)
│   └── PathLost     large packets are lost on the way to the broker (come back)
├── ModelRefused     the weights server does not have the model that a ticket names (final)
├── HeadGone         no broker has answered any start of a host for too long (final)
├── BadQuestion      the address of a page asks for something that cannot be asked
└── NotKept          the address of a page names something that is not there, or not any more

Stuck                a fault of the simulation behind `offbeat plan`

``final`` says that a new start of the process would only repeat the error, ``again`` that an engine has to start it
again, see `exit_code`.
"""

import contextlib
from pathlib import Path
from typing import ClassVar


class LaunchError(Exception):
    """Base of the errors that end the command line with a message.

    The exit code is 1. A role that is run by hand ends with `launch.errors.exit_code`.
    """


class ConfigError(LaunchError, ValueError):
    """The run file is wrong; every line names field, value and cure."""

    final: ClassVar[bool] = True


class NotThereYet(LaunchError):
    """The first host of a learner has not made the run folder; a later start may find it."""


class FolderInUse(LaunchError):
    """Another process holds the folder of a run or of a host; a later start may find that it has ended."""

    again: ClassVar[bool] = True


class HostTaken(FolderInUse):
    """A host of this name is still at work on this machine; a later start may find that it has ended."""


class RoleFailed(LaunchError, RuntimeError):
    """A process that the run needs has ended; the text holds the end of its log.

    Args:
        text: what has happened.
        final: whether another start would only repeat it.
    """

    final: bool

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class RecordingError(LaunchError):
    """The journal does not hold what was trained; the text says what is missing, and the cure."""


class NothingTrained(LaunchError):
    """The run ended before its first step, so there is no summary; the text says what ended it.

    Args:
        text: what has happened.
        again: whether an engine should start the run again, because a signal has ended it.
    """

    again: bool

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class TooSlow(LaunchError):
    """Too little happened to measure anything."""


class NoAnswer(LaunchError, ConnectionError):
    """The broker did not return its status; the text has the address that was asked, and the error."""


class NoHead(NoAnswer):
    """Broker or weights server of the head have not answered a host since its start; a later start may find them."""

    again: ClassVar[bool] = True


class PathLost(NoAnswer):
    """Short messages reach the broker and long ones do not; a later start may find that the path has healed."""

    again: ClassVar[bool] = True


class ModelRefused(LaunchError):
    """The weights server does not have the model that a ticket names, or refuses the ticket: a new ticket is needed."""

    final: ClassVar[bool] = True


class HeadGone(LaunchError):
    """No broker has answered any start of a host for longer than `fleet.no_head_hours`; the text has the cure."""

    final: ClassVar[bool] = True


class Stuck(RuntimeError):
    """The simulation ran out of events before its last step, which is a fault of the simulation."""


DONE = 0
"""A learner has done its work. As a note of another process: it has ended because the run is over."""
FAILED = 1
"""Error that another start may not repeat, such as a lost connection. Python's own code for an exception."""
COME_BACK = 75
"""The process has left a run that goes on, found no run, or is a head that a signal ended; engines start it again."""
FINAL = 65
"""Error that another start would only repeat: a wrong setting, a diverged run, an unusable journal."""

MAX_REASON = 1_000
"""Characters kept of a role's reason to end."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a role that ends because of ``error``, whose class says whether it is final.

    Example:
        >>> from actors.errors import Orphaned
        >>> from launch.errors import ConfigError
        >>> exit_code(ConfigError("x")), exit_code(OSError("y")), exit_code(Orphaned("no learner"))
        (65, 1, 75)
    """
    if getattr(error, "final", False):
        return FINAL
    return COME_BACK if getattr(error, "again", False) else FAILED


def leave_note(folder: Path, name: str, code: int, reason: str = "") -> None:
    """Write why a role ends, for `read_note` and `read_reason`.

    The code is there, too, because torchrun exits with 1 whatever its ranks exited with. The first note stays, unless
    a final error follows: when one rank of a learner ends, the others lose their connection and end with errors of
    their own.
    """
    # Invariant: ranks of several hosts write here at a time. Only a final note may replace another one.
    with (
        contextlib.suppress(FileExistsError),
        open(folder / f"{name}.exit", "w" if code == FINAL else "x", encoding="utf-8") as note,
    ):
        note.write(f"{code}\n{' '.join(reason.split())[:MAX_REASON]}")


def read_note(folder: Path, name: str) -> int | None:
    """Return the code that a role wrote before it ended, or None if it wrote none."""
    try:
        return int(_note(folder, name)[0])
    except (OSError, ValueError):
        return None


def read_reason(folder: Path, name: str) -> str:
    """Return the line in which a role wrote why it ended, or "" if it wrote none."""
    try:
        return _note(folder, name)[1]
    except OSError:
        return ""


def _note(folder: Path, name: str) -> tuple[str, str]:
    code, _, reason = (folder / f"{name}.exit").read_text(encoding="utf-8", errors="replace").partition("\n")
    return code, reason


def clear_note(folder: Path, name: str) -> None:
    """Remove the code that the previous process wrote."""
    (folder / f"{name}.exit").unlink(missing_ok=True)


class BadQuestion(LaunchError, ValueError):
    """A parameter in the address of a page has a value that it cannot have; the text names it."""


class NotKept(LaunchError, LookupError):
    """What the address of a page names is not there, or was deleted; the text says how to keep more."""
