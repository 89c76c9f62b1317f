"""Single connections behind a ROUTER: whether one is still open, and how to end it.

ZeroMQ names neither and cuts none. But a received frame tells the descriptor of the socket it came by, and the inode of
a socket is its own for as long as it is open. So a descriptor that stands for something else by now is found out.
"""

import contextlib
import os
import socket
import stat
from typing import NamedTuple

import zmq


class Connection(NamedTuple):
    """A socket of ZeroMQ's in this process."""

    descriptor: int
    inode: int

    @classmethod
    def of(cls, frame: "zmq.Frame") -> "Connection | None":
        """The one that a frame came by; None: it cannot be told, as with a frame whose connection is gone."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
            status = os.fstat(descriptor)
        except (zmq.ZMQError, OSError, ValueError):
            return None
        return cls(descriptor, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None

    @property
    def is_open(self) -> bool:
        """Whether it is there still, as far as the kernel and ZeroMQ know."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def cut(self) -> bool:
        """End it, for ZeroMQ as if the other side had; False: it had ended before."""
        with contextlib.suppress(OSError):
            own = os.dup(self.descriptor)  # nobody closes this one between the look and the end
            with socket.socket(fileno=own) as held:
                if os.fstat(own).st_ino == self.inode:
                    held.shutdown(socket.SHUT_RDWR)
                    return True
        return False
