"""The socket on which a generator listens for actors, and the address that actors connect to."""

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from actors.config import GeneratorConfig
from protocol.codec import Frames
from protocol.security.addresses import is_wildcard, split_endpoint
from protocol.security.guard import Guard, GuardedSocket
from protocol.security.keys import AllowList, Principal
from protocol.sockets import AsyncSocket, router

log = logging.getLogger(__name__)

MAX_WARNINGS = 100

OnRequest = Callable[[list[bytes]], None]


class Listener:
    """Socket that actors connect to. With keys it is encrypted, and admits only actors whose key the broker admits.

    Raises:
        OSError: the address cannot be bound.
        KeysUnusable: the folder lacks keys of a generator.
    """

    def __init__(self, config: GeneratorConfig, name: str, keys: Path | None, on_frames: OnRequest) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._on_frames, self._strangers = on_frames, 0
        self._guard = Guard(context, keys, "generator", name) if keys is not None else None
        plain = router(context) if self._guard is None else self._guard.router(context)
        try:
            plain.bind(config.endpoint)
        except zmq.ZMQError as error:
            plain.close()
            self._close_guard()
            raise OSError(f"generator.endpoint {config.endpoint}: {error}") from None
        self.endpoint = plain.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._guard is None:
            self._socket = AsyncSocket(plain, on_frames)
        else:
            self._socket = GuardedSocket(plain, self._received, self._guard)

    @property
    def public_key(self) -> str:
        """Public key (Z85) that the socket shows to actors; "" if nothing is encrypted."""
        return self._guard.public_key if self._guard is not None else ""

    def admit(self, public_keys: Sequence[str]) -> None:
        """Admit actors with these keys (Z85) and no others. Until the first call the keys folder counts."""
        if self._guard is not None:
            self._guard.admit(AllowList({key: Principal("actor", "actor", key) for key in public_keys}))

    def send(self, frames: Frames) -> None:
        """Send frames to the actor whose routing id is the first frame."""
        self._socket.send(frames)

    def close(self) -> None:
        """Close the socket. Frames that are queued are still sent."""
        self._socket.close()
        self._close_guard()

    def _received(self, frames: list[bytes], sender: Principal | None) -> None:
        if sender is not None:
            self._on_frames(frames)
            return
        self._strangers += 1
        if self._strangers <= MAX_WARNINGS:
            log.warning("a message under a key that is admitted no more was left aside")

    def _close_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()


def endpoint_for_actors(bound: str, host: str, broker: str) -> str:
    """Return the endpoint that actors connect to: the bound endpoint, with an address that they can reach.

    Args:
        bound: bound endpoint, as ZeroMQ reports it.
        host: name or address by which actors reach this host. If it is empty and the socket listens on all
            addresses, the result has the address from which this host reaches the broker.
        broker: ZeroMQ endpoint of the broker.

    Example:
        >>> endpoint_for_actors("tcp://0.0.0.0:5557", "node-7", "tcp://127.0.0.1:5755")
        'tcp://node-7:5557'
        >>> endpoint_for_actors("tcp://0.0.0.0:5557", "", "tcp://127.0.0.1:5755")
        'tcp://127.0.0.1:5557'
    """
    at, port = split_endpoint(bound)
    if not at or not (host or is_wildcard(at)):
        return bound
    return f"tcp://{host or _address_towards(broker)}:{port}"


def _address_towards(broker: str) -> str:
    host, port = split_endpoint(broker)
    if not host or is_wildcard(host):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # To connect a datagram socket sends nothing. It only chooses the local address.
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own
