"""Errors of environments.

EnvError
├── UnknownEnv        no suite of that name
├── RefusedFamily     a family whose scorer is unsafe or accepts junk
└── ScorerFailed      the scorer process did not answer, could not be started, or refused a request
"""


class EnvError(Exception):
    """Base of what goes wrong with an environment."""


class UnknownEnv(EnvError, LookupError):
    """No suite of that name; the text names the nearest one."""


class RefusedFamily(EnvError, ValueError):
    """A family that must not be used in this way; the text says why and what to do."""


class ScorerFailed(EnvError, RuntimeError):
    """The scorer process did not answer, could not be started, or refused a request."""
