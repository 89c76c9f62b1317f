"""Errors of starting and supervising.

LaunchError
├── ConfigError   the run file, or a combination in it, is wrong; nothing was started
└── RoleFailed    a process that the run cannot do without has ended
"""


class LaunchError(Exception):
    """Base of what ends the command line with a message and exit code 1."""


class ConfigError(LaunchError, ValueError):
    """The run file is wrong; every line names field, value and cure."""


class RoleFailed(LaunchError, RuntimeError):
    """A process that the run cannot do without has ended; the text holds the end of its log."""
