"""Addresses to listen on: who can reach them, and whether that is allowed."""

import contextlib
import ipaddress

LOOPBACK_ONLY = (
    "only loopback and ipc may be bound while security.encrypt is false, because then messages are neither encrypted "
    "nor authenticated; make keys with `offbeat keys make FOLDER`, set security.keys to it, and encrypt to true"
)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at this host.

    Example:
        >>> is_loopback("localhost"), is_loopback("[::1]"), is_loopback("10.0.0.1"), is_loopback("*")
        (True, True, False, False)
    """
    with contextlib.suppress(ValueError):  # a name
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def is_wildcard(host: str) -> bool:
    """Whether this host stands for all addresses of the machine.

    Example:
        >>> is_wildcard("0.0.0.0"), is_wildcard("*"), is_wildcard("[::]"), is_wildcard("10.0.0.1")
        (True, True, True, False)
    """
    with contextlib.suppress(ValueError):
        return host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Host and port of ``tcp://host:port``; both empty for anything else.

    Example:
        >>> split_endpoint("tcp://[::1]:5755"), split_endpoint("ipc:///tmp/x")
        (('[::1]', '5755'), ('', ''))
    """
    if not endpoint.startswith("tcp://"):
        return "", ""
    host, _, port = endpoint[len("tcp://") :].rpartition(":")
    return host, port


def why_not_bound(setting: str, endpoint: str, *, encrypted: bool) -> str:
    """Why a ZeroMQ socket must not listen there, with the cure; empty if it may.

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
