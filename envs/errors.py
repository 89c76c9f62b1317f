"""Errors of environments.

EnvError
├── UnknownEnv        there is no suite of this name (final)
├── RefusedFamily     the family's scorer is unsafe or accepts junk (final)
├── NoConfinement     programs of a model cannot be confined on this host (final)
├── ServiceFailed     a service that a reward needs did not answer: nobody's fault, the task runs again
│   ├── NotStarted    the run starts this service, and there is no run yet
│   └── ServerLost    an environment server does not answer, or has lost the episode
├── RemoteFailed      an environment failed an episode on its server
└── ScorerFailed      the scorer process did not answer, could not be started, or refused a request

``final`` means that a new start of the process would only repeat the error; see `launch.errors`.
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


class NoConfinement(EnvError, RuntimeError):
    """Programs that a model writes cannot be confined on this host, so none is run; the message says why."""

    final: ClassVar[bool] = True


class ServiceFailed(EnvError, RuntimeError):
    """A service that a reward needs, such as a judge, did not answer. Environments of users may raise it, too."""


class NotStarted(ServiceFailed):
    """The run starts this service itself, and there is no run yet: the reward cannot be tried beforehand."""


class ServerLost(ServiceFailed):
    """An environment server does not answer, or has lost the episode because it was started anew."""


class RemoteFailed(EnvError, RuntimeError):
    """An environment failed an episode on its server; the message has the error, its place and its last lines."""


class ScorerFailed(EnvError, RuntimeError):
    """The scorer process did not answer, could not be started, or refused a request."""
