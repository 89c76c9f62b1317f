"""Single connections behind a ROUTER: check whether one is still open, and end it.

ZeroMQ offers neither. But a received frame has the descriptor of the socket it came by, and a socket keeps
its inode for as long as it is open. So a changed inode shows that the descriptor now belongs to something
else.
"""

import contextlib
import os
import socket
import stat
from typing import NamedTuple

import zmq


class Connection(NamedTuple):
    """A socket of ZeroMQ in this process, by descriptor and inode."""

    descriptor: int
    inode: int

    @classmethod
    def of(cls, frame: "zmq.Frame") -> "Connection | None":
        """Return the connection that a frame came by; None if it is unknown, as it is once it has ended."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
            status = os.fstat(descriptor)
        except (zmq.ZMQError, OSError, ValueError):
            return None
        return cls(descriptor, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None

    @property
    def is_open(self) -> bool:
        """Whether the connection is still open, as far as the kernel and ZeroMQ know."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def cut(self) -> bool:
        """End the connection; to ZeroMQ the other side has ended it. Return False if it had ended before."""
        with contextlib.suppress(OSError):
            # Work on a duplicate, which no other thread can close between the check and the shutdown.
            own = os.dup(self.descriptor)
            with socket.socket(fileno=own) as held:
                if os.fstat(own).st_ino == self.inode:
                    held.shutdown(socket.SHUT_RDWR)
                    return True
        return False
