"""A trial of the path to the broker: a short message and a long one, which the broker sends back."""

import time
from pathlib import Path

import zmq

from protocol.codec import encode
from protocol.messages.fields import MAX_ECHO
from protocol.messages.peers import Echo
from protocol.security.client import ClientKeys
from protocol.session import SHORT_ONLY
from protocol.sockets import dealer

FIRST_S = 20.0
"""Longest wait for the short message to come back, handshake included."""
LONG_S = 10.0
"""Longest wait for the long message to come back: 64 KB at 13 KB/s both ways."""


def path_trouble(
    endpoint: str, keys: Path | None, peer: str, *, first_s: float = FIRST_S, long_s: float = LONG_S
) -> str:
    """Return what is wrong with the path to a broker; "" if a long message comes back, or if nothing does.

    A broker that does not answer at all is found by whoever joins it.

    Args:
        endpoint: the broker's address.
        keys: keys folder; None: nothing is encrypted.
        peer: name of an actor that the keys permit. It does not join.
        first_s: longest wait for the short message.
        long_s: longest wait for the long message.

    Raises:
        KeysUnusable: a key is missing or cannot be used.
    """
    own = None if keys is None else ClientKeys.read(keys, "actor", peer, "broker")
    # A name of its own, so that without keys it does not stand in the way of the peer.
    socket = dealer(zmq.Context.instance(), f"trial-{peer}", own)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(endpoint)
        if not _comes_back(socket, 16, first_s) or _comes_back(socket, MAX_ECHO, long_s):
            return ""
    finally:
        socket.close()
    return (
        f"{SHORT_ONLY}, one of {MAX_ECHO:,} bytes did not come back from {endpoint} in {long_s:g} s: large packets are "
        "lost on the way, or the line is very slow; lower the MTU of this host's network device (docs/run/security.md)"
    )


def _comes_back(socket: "zmq.Socket[bytes]", nbytes: int, seconds: float) -> bool:
    """Send a message and return whether any answer comes. An older broker answers that it does not know it."""
    deadline = time.monotonic() + seconds
    socket.send_multipart(encode(Echo(text="x" * nbytes)))
    while (left := deadline - time.monotonic()) > 0:
        if socket.poll(int(left * 1000) + 1):
            socket.recv_multipart()
            return True
    return False
