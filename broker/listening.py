"""Where the broker may listen: anywhere with keys, on this machine only without."""

import contextlib
import resource
from pathlib import Path

from broker.errors import BindRefused
from protocol.security.addresses import LOOPBACK_ONLY, is_loopback, why_not_bound


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


def split_http(address: str, keys: Path | None = None) -> tuple[str, int]:
    """Host and port of ``host:port``; refuses one that other hosts can reach, unless a token is asked for.

    Example:
        >>> split_http("127.0.0.1:8080")
        ('127.0.0.1', 8080)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BindRefused(f"broker.http {address}: write host:port, for example 127.0.0.1:5756")
    if not is_loopback(host) and keys is None:
        raise BindRefused(f"broker.http {address}: {LOOPBACK_ONLY}")
    return host.strip("[]"), int(port)
