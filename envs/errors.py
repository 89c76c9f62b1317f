"""Errors of environments.

EnvError
├── UnknownEnv        there is no suite of this name (final)
├── RefusedFamily     the family's scorer is unsafe or accepts junk (final)
└── ScorerFailed      the scorer process did not answer, could not be started, or refused a request

``final`` means that a new start of the process would only repeat the error; see `launch.exit_codes`.
"""

from typing import ClassVar


class EnvError(Exception):
    """Base of the errors of environments."""


class UnknownEnv(EnvError, LookupError):
    """There is no suite of this name; the message names the nearest one."""

    final: ClassVar[bool] = True


class RefusedFamily(EnvError, ValueError):
    """The family must not be used in this way; the message says why and what to do."""

    final: ClassVar[bool] = True


class ScorerFailed(EnvError, RuntimeError):
    """The scorer process did not answer, could not be started, or refused a request."""
