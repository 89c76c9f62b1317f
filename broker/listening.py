"""Where the broker may listen: anywhere with keys, on this machine only without."""

import contextlib
import resource
from pathlib import Path

from broker.errors import BindRefused
from protocol.security.addresses import why_not_bound


def allow_many_connections() -> None:
    """Raise the limit of open files as far as it may be raised: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):  # the kernel has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_endpoint(endpoint: str, keys: Path | None = None) -> None:
    """Refuse an endpoint that other hosts can reach, unless messages are encrypted and senders authenticated.

    Args:
        keys: folder of the keys; None: messages travel as they are.

    Example:
        >>> check_endpoint("tcp://127.0.0.1:5555"); check_endpoint("ipc:///tmp/broker")
        >>> check_endpoint("tcp://0.0.0.0:5555", Path("keys"))
        >>> check_endpoint("tcp://0.0.0.0:5555")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        broker.errors.BindRefused: broker.endpoint tcp://0.0.0.0:5555: only loopback and ipc may be bound...
    """
    if why := why_not_bound("broker.endpoint", endpoint, encrypted=keys is not None):
        raise BindRefused(why)
