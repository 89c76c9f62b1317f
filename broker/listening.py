"""Prepares the broker to listen: raises a limit of the kernel, and explains a refused address."""

import contextlib
import errno
import os
import resource
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


def allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed, because each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        # The kernel may have a lower limit of its own, which it enforces with an error.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind_failure(field: str, address: str, number: int | None) -> str:
    """Return one line on why an address cannot be listened on: field, value, holder of the port and cure.

    Args:
        field: setting of the run file that holds the address.
        number: `errno` of the error that listening raised.

    Example:
        >>> bind_failure("broker.http", "10.9.9.9:5756", errno.EADDRNOTAVAIL)
        'broker.http is 10.9.9.9:5756, but this host has no such address; give one of its own, as a number'
    """
    port = address.rpartition(":")[2]
    if number == errno.EADDRINUSE:
        return (
            f"{field} is {address}, but the port is in use{holder(int(port)) if port.isdecimal() else ''}; choose "
            "another one, or port 0 to take a free one"
        )
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{field} is {address}, but this host has no such address; give one of its own, as a number"
    return (
        f"{field} is {address}, which cannot be listened on: {os.strerror(number or 0)}; choose another one"
    )


def holder(port: int) -> str:
    """Return " by process PID (NAME)" for the process that listens on a TCP port, or "" if it is not visible."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in PROC.iterdir() if sockets else ():
        # Other users' processes cannot be looked into, and a process may end meanwhile.
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and any(
                os.readlink(fd) in sockets for fd in (process / "fd").iterdir()
            ):
                return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _listening(port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port."""
    inodes = []
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.append(fields[9])
    return inodes
