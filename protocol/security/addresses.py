"""Addresses to listen on: which hosts can reach them, and whether that is allowed."""

import contextlib
import ipaddress
from pathlib import Path

from protocol.errors import AddressRefused

LARGEST_PORT = 65_535

LOOPBACK_ONLY = (
    "only loopback and ipc may be bound while security.encrypt is false, because then messages are neither encrypted "
    "nor authenticated; make keys with `offbeat keys make FOLDER`, set security.keys to it, and encrypt to true"
)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at this host.

    Example:
        >>> is_loopback("localhost"), is_loopback("[::1]"), is_loopback("10.0.0.1"), is_loopback("*")
        (True, True, False, False)
    """
    # `ip_address` raises ValueError for a name.
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def is_wildcard(host: str) -> bool:
    """Return whether this host stands for all addresses of the machine.

    Example:
        >>> is_wildcard("0.0.0.0"), is_wildcard("*"), is_wildcard("[::]"), is_wildcard("10.0.0.1")
        (True, True, True, False)
    """
    with contextlib.suppress(ValueError):
        return host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host and port of ``tcp://host:port``; both are empty for any other endpoint.

    Example:
        >>> split_endpoint("tcp://[::1]:5755"), split_endpoint("ipc:///tmp/x")
        (('[::1]', '5755'), ('', ''))
    """
    if not endpoint.startswith("tcp://"):
        return "", ""
    host, _, port = endpoint[len("tcp://") :].rpartition(":")
    return host, port


def why_not_bound(setting: str, endpoint: str, *, encrypted: bool) -> str:
    """Return why a ZeroMQ socket must not listen at an endpoint, with the cure; "" if it may.

    Example:
        >>> why_not_bound("broker.endpoint", "tcp://10.0.0.1:5755", encrypted=True)
        ''
        >>> why_not_bound("broker.endpoint", "tcp://10.0.0.1:5755", encrypted=False)[:64]
        'broker.endpoint tcp://10.0.0.1:5755: only loopback and ipc may b'
    """
    if endpoint.startswith("ipc://"):
        return ""
    host, port = split_endpoint(endpoint)
    if not host or not (port.isdecimal() or port == "*"):
        return f"{setting} {endpoint}: write tcp://HOST:PORT or ipc://PATH"
    if is_loopback(host) or encrypted:
        return ""
    return f"{setting} {endpoint}: {LOOPBACK_ONLY}"


def check_endpoint(setting: str, endpoint: str, keys: Path | None = None) -> None:
    """Refuse an endpoint that other hosts can reach, unless messages are encrypted and senders authenticated.

    Args:
        setting: name of the field in the run file, for the error.
        keys: keys folder; None: messages are neither encrypted nor authenticated.

    Raises:
        AddressRefused: see `why_not_bound`.

    Example:
        >>> check_endpoint("broker.endpoint", "ipc:///tmp/broker")
        >>> check_endpoint("broker.endpoint", "tcp://0.0.0.0:5555", Path("keys"))
        >>> check_endpoint("broker.endpoint", "tcp://0.0.0.0:5555")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        protocol.errors.AddressRefused: broker.endpoint tcp://0.0.0.0:5555: only loopback and ipc may be bound...
    """
    if why := why_not_bound(setting, endpoint, encrypted=keys is not None):
        raise AddressRefused(why)


def split_address(setting: str, address: str, keys: Path | None) -> tuple[str, int]:
    """Split ``host:port`` of an HTTP server, and refuse an address that strangers could reach.

    Args:
        setting: name of the field in the run file, for the error.
        keys: keys folder with the token that the server asks for; None: it asks for none.

    Raises:
        AddressRefused: the address is not ``host:port``, or other hosts can reach it and there is no token.

    Example:
        >>> split_address("weights.http", "127.0.0.1:5757", None)
        ('127.0.0.1', 5757)
        >>> split_address("weights.http", "0.0.0.0:5757", None)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        protocol.errors.AddressRefused: weights.http 0.0.0.0:5757: only loopback ...
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > LARGEST_PORT:
        raise AddressRefused(f"{setting} {address}: write host:port, for example 127.0.0.1:5756")
    if not is_loopback(host) and keys is None:
        raise AddressRefused(f"{setting} {address}: {LOOPBACK_ONLY}")
    return host.strip("[]"), int(port)
