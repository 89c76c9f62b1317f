"""The broker's socket for peers: it binds, and sends messages to peers by name."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from broker.core.ledger import Ledger
from broker.core.outbox import Send
from broker.encoder import Encoder
from broker.errors import BindRefused
from broker.identities import Identities
from broker.listening import bind_failure
from protocol.codec import Buffer
from protocol.errors import LimitExceeded, LinkDown
from protocol.security.connections import Connection
from protocol.security.guard import Guard, GuardedSocket
from protocol.security.keys import Principal
from protocol.sockets import AsyncSocket, router

log = logging.getLogger(__name__)

MAX_WARNINGS = 100


def may_log(ledger: Ledger, code: str) -> bool:
    """Return whether a refusal with this code is still logged. The limit keeps the log small."""
    return ledger.refused.get(code, 0) < MAX_WARNINGS


class Received(Protocol):
    """Handles one message, whose first frame is the routing id. ``sender`` is the owner of its key."""

    def __call__(self, frames: list[Buffer], sender: Principal | None = None) -> None: ...


class PeerSocket:
    """A ROUTER socket, with the identities of its peers if it is encrypted. `bind` opens it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.guard: Guard | None = None
        """Who may connect; None without encryption."""
        self.identities: Identities | None = None
        """Which connection speaks for which peer; None without encryption, where the routing id is the name."""
        self.socket: AsyncSocket | None = None

    def bind(
        self,
        endpoint: str,
        keys: Path | None,
        *,
        heard: Callable[[str], bool],
        received: Received,
        after_batch: Callable[[], None],
    ) -> None:
        """Listen at ``endpoint``, encrypted if there are ``keys``.

        Args:
            heard: returns whether the broker has heard a peer of this name lately.
            received: called with each message.
            after_batch: called after the messages that were there at one time.

        Raises:
            BindRefused: the address is taken, or does not belong to this host.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        if keys is not None:
            self.guard = Guard(context, keys, "broker")
            self.identities = Identities(self.guard.admission, heard)
        socket = router(context) if self.guard is None else self.guard.router(context)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise BindRefused(bind_failure("broker.endpoint", endpoint, error.errno)) from None
        if self.guard is None:
            self.socket = AsyncSocket(socket, received)
        else:
            self.socket = GuardedSocket(socket, received, self.guard)
        self.socket.after_batch = after_batch
        log.info("peers connect to %s", socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def pumping(self) -> bool:
        """Whether the socket hands over a batch of messages now, and calls ``after_batch`` behind them."""
        return self.socket is not None and self.socket.pumping

    def connection(self) -> Connection | None:
        """Return the connection of the message that is handled now; None without encryption."""
        return self.socket.connection() if isinstance(self.socket, GuardedSocket) else None

    def name(self, route: bytes) -> str:
        """Return the name of the peer at the end of a connection."""
        return (
            route.decode("utf-8", "surrogateescape")
            if self.identities is None
            else self.identities.name(route)
        )

    def _route(self, name: str) -> bytes | None:
        return (
            name.encode("utf-8", "surrogateescape")
            if self.identities is None
            else self.identities.route(name)
        )

    def send(self, actions: Sequence[Send]) -> None:
        """Send these messages. One that cannot be sent is logged and counted."""
        encoder = Encoder()
        for action in actions:
            route = self._route(action.peer)
            # No connection of this peer is known, for example since a restart of the broker. ZeroMQ would
            # drop the message, too.
            if route is None:
                continue
            assert self.socket is not None
            try:
                self.socket.send([route, *encoder.frames(action)])
            except (LimitExceeded, LinkDown) as error:
                if may_log(self._ledger, "not_sent"):
                    log.error("%s to %s not sent: %s", type(action.message).__name__, action.peer, error)
                self._ledger.refuse("not_sent")

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        if self.guard is not None:
            self.guard.close()
