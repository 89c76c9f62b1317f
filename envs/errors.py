"""Errors of environments.

EnvError
├── UnknownEnv        no suite of that name (final)
├── RefusedFamily     a family whose scorer is unsafe or accepts junk (final)
└── ScorerFailed      the scorer process did not answer, could not be started, or refused a request

``final`` says that a new start of the process would only repeat the error, see `launch.exit_codes`.
"""

from typing import ClassVar


class EnvError(Exception):
    """Base of what goes wrong with an environment."""


class UnknownEnv(EnvError, LookupError):
    """No suite of that name; the text names the nearest one."""

    final: ClassVar[bool] = True


class RefusedFamily(EnvError, ValueError):
    """A family that must not be used in this way; the text says why and what to do."""

    final: ClassVar[bool] = True


class ScorerFailed(EnvError, RuntimeError):
    """The scorer process did not answer, could not be started, or refused a request."""
