"""TCP ports on loopback that nothing listens on."""

import contextlib
import random
import socket
from pathlib import Path

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10_240
PORT_TRIES = 100


def free_port() -> int:
    """Return a TCP port on loopback that nothing listens on now. Who needs several calls `free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different TCP ports on loopback that nothing listens on now.

    The ports lie below the range from which the kernel assigns ports to clients. Otherwise a peer that keeps
    trying to reach a broker that is being restarted could be assigned that very port, and the broker would
    find it taken. If no such port is found, the kernel chooses one.

    >>> len(set(free_ports(3)))
    3
    """
    with contextlib.ExitStack() as stack:
        # Each port stays bound until all are found, so that none is found twice.
        return [_bind_free(stack.enter_context(socket.socket())) for _ in range(count)]


def _bind_free(sock: socket.socket) -> int:
    highest = _lowest_client_port() - 1
    for _ in range(PORT_TRIES if highest > LOWEST_PORT else 0):
        port = random.randint(LOWEST_PORT, highest)
        with contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])


def _lowest_client_port() -> int:
    try:
        return int(PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
