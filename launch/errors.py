"""Errors of starting and supervising.

LaunchError
├── ConfigError      the run file, or a combination in it, is wrong; nothing was started (final)
├── NotThereYet      the first host of a learner has not made the run folder
├── RoleFailed       a process that the run needs has ended
├── RecordingError   a journal does not hold what was trained
├── NothingTrained   the run ended before its first step
├── TooSlow          too little happened to measure anything
└── NoAnswer         the broker did not return its status

Stuck                a fault of the simulation behind `offbeat plan`

``final`` says that a new start of the process would only repeat the error, see `launch.exit_codes`.
"""

from typing import ClassVar


class LaunchError(Exception):
    """Base of the errors that end the command line with a message.

    The exit code is 1. A role that is run by hand ends with `launch.exit_codes.exit_code`.
    """


class ConfigError(LaunchError, ValueError):
    """The run file is wrong; every line names field, value and cure."""

    final: ClassVar[bool] = True


class NotThereYet(LaunchError):
    """The first host of a learner has not made the run folder; a later start may find it."""


class RoleFailed(LaunchError, RuntimeError):
    """A process that the run needs has ended; the text holds the end of its log."""


class RecordingError(LaunchError):
    """The journal does not hold what was trained; the text says what is missing, and the cure."""


class NothingTrained(LaunchError):
    """The run ended before its first step, so there is no summary; the text says what ended it."""


class TooSlow(LaunchError):
    """Too little happened to measure anything."""


class NoAnswer(LaunchError, ConnectionError):
    """The broker did not return its status; the text has the address that was asked, and the error."""


class Stuck(RuntimeError):
    """The simulation ran out of events before its last step, which is a fault of the simulation."""
