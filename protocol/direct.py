"""Peers of one process: frames that would go through a socket are passed by a call of the event loop.

An address ``direct://NAME`` names a listener of this process, so that all roles of a run can stand in one process and
one debugger (`offbeat train --in-process`). Nothing is encrypted, because nothing leaves the process.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from protocol.codec import Buffer

log = logging.getLogger(__name__)

DIRECT = "direct://"
"""First characters of the address of a listener of this process."""

_listeners: dict[str, "DirectListener"] = {}


def is_direct(endpoint: str) -> bool:
    """Return whether an address names a listener of this process.

    Example:
        >>> is_direct("direct://broker"), is_direct("tcp://127.0.0.1:5755")
        (True, False)
    """
    return endpoint.startswith(DIRECT)


class DirectListener:
    """Stands in for the `protocol.sockets.AsyncSocket` of a ROUTER.

    Args:
        endpoint: address, ``direct://NAME``, which nobody else in this process may have.
        on_frames: called with the frames of each message; the first is the name of its sender.
    """

    pumping = False

    def __init__(self, endpoint: str, on_frames: Callable[[Any], None]) -> None:
        if endpoint in _listeners:
            raise ValueError(f"{endpoint} is taken")
        self.endpoint, self.on_frames = endpoint, on_frames
        self.after_batch: Callable[[], None] = lambda: None
        self.connections: dict[bytes, DirectConnection] = {}
        """Connections of this process, by the name of the peer that opened them."""
        _listeners[endpoint] = self

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send frames to the peer whose name is the first frame; leave them out if it is gone, as ZeroMQ does."""
        connection = self.connections.get(bytes(frames[0]))
        if connection is not None:
            _call_soon(connection.on_frames, list(frames[1:]))

    def close(self) -> None:
        _listeners.pop(self.endpoint, None)


class DirectConnection:
    """Stands in for the `protocol.sockets.AsyncSocket` of a DEALER, and for the watch of its handshakes.

    Args:
        endpoint: address of a listener of this process.
        identity: name of this peer.
        on_frames: called with the frames of each message.
    """

    why = ""
    """Reason why a handshake failed: there are no handshakes."""
    connections = 1

    def __init__(self, endpoint: str, identity: str, on_frames: Callable[[Any], None]) -> None:
        self._endpoint, self._name, self.on_frames = endpoint, identity.encode(), on_frames
        self.after_look: Callable[[], None] = lambda: None
        if (listener := _listeners.get(endpoint)) is None:
            raise ValueError(f"nobody in this process listens at {endpoint}")
        listener.connections[self._name] = self
        # The owner learns of its connection after it has set `after_look`, as it would of a handshake.
        asyncio.get_running_loop().call_soon(lambda: self.after_look())

    @property
    def connected(self) -> bool:
        """Whether the listener is there."""
        return self._endpoint in _listeners

    def reconnected(self) -> bool:
        """Return False: a connection in one process is never replaced."""
        return False

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message; leave it out if the listener is gone."""
        if (listener := _listeners.get(self._endpoint)) is not None:
            _call_soon(listener.on_frames, [self._name, *frames])

    def close(self) -> None:
        """End the connection; messages that were sent still arrive."""
        listener = _listeners.get(self._endpoint)
        if listener is not None and listener.connections.get(self._name) is self:
            del listener.connections[self._name]


def _call_soon(handle: Callable[[Any], None], frames: list[Buffer]) -> None:
    # Not called at once: a handler that sends must not be called again before it has returned.
    asyncio.get_running_loop().call_soon(_guarded, handle, frames)


def _guarded(handle: Callable[[Any], None], frames: list[Buffer]) -> None:
    try:
        handle(frames)
    except Exception:
        # As with a socket: the messages behind this one are still handled.
        log.exception("a message could not be handled")
