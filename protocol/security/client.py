"""The client's half of CURVE: the keys of a connection, and readable reasons why the server refuses them."""

import contextlib
import secrets
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.security.keys import KeyPair, KeyRole, key_pair, public_key

ROUTING_ID_BYTES = 16
HANDSHAKE_MS = 5_000
"""Time after which ZeroMQ cuts a connection whose handshake is not complete."""
REFUSED_FOR_GOOD, REFUSED_FOR_NOW = 400, 500
"""Status of a refused handshake. ZAP has 300 for "for now", but then ZeroMQ keeps the connection open."""
REVOKED = "this key is not in the broker's keys folder any more; bring the keys of this role from there anew"
"""Why a broker refuses a message of a peer whose key was revoked."""
REFUSED_KEY = "refused our key"
"""Words in the reason of a handshake that a server has refused, because it does not know the key."""
RETRY_S = 1.0
MAX_EVENTS = 64
_GIVES_UP = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_WATCHED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


class ClientKeys(NamedTuple):
    """Keys of one connection that this process opens."""

    own: KeyPair
    server: bytes
    server_role: KeyRole
    folder: Path
    told: bool = False
    """True if the broker told the key of the server; False if it is in the folder."""

    @classmethod
    def read(
        cls,
        folder: Path,
        role: KeyRole,
        peer: str,
        server_role: KeyRole,
        server_peer: str = "",
        told: str = "",
    ) -> "ClientKeys":
        """Read the keys with which ``peer`` connects to a server of ``server_role``.

        Args:
            told: public key (Z85) of the server as the broker told it; "": it is in the folder.

        Raises:
            KeysUnusable: a key is missing or cannot be used.
        """
        own = key_pair(folder, role, peer)
        server = told.encode() or public_key(folder, server_role, server_peer)
        return cls(own, server, server_role, folder, bool(told))

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the keys on a socket; call it before the socket connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


def unguessable_id() -> bytes:
    """Return a routing id that no other peer knows, so that none can take it over."""
    return b"\x01" + secrets.token_bytes(ROUTING_ID_BYTES)


class HandshakeWatch:
    """Watches the handshakes of a socket that connects, and connects again where ZeroMQ gives up.

    ZeroMQ stops trying after a refusal, and after bytes that are no message. But a key may be listed a moment
    later, brokers are restarted, and one corrupted message must not silence the peer for ever.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", endpoint: str, keys: ClientKeys | None, server: KeyRole
    ) -> None:
        self._socket, self._endpoint, self._keys = socket, endpoint, keys
        self._server = f"the {server} at {endpoint}"
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._again: float | None = None
        self._known = 0
        self.connections = 0
        """Number of handshakes that succeeded."""
        self.connected = False
        """True if the last handshake succeeded and its connection has not ended since."""
        self.why = ""
        """Why the last handshake failed, with the cure; "" if it succeeded."""

    def look(self, now: float) -> str:
        """Process new events of the socket; return the reason of a failure if it has changed, else ""."""
        before = self.why
        for _ in range(MAX_EVENTS):
            try:
                frames = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                # There are no more events.
                break
            event = parse_monitor_message(frames)
            self._happened(int(event["event"]), int(event["value"]), now)
        if self._again is not None and now >= self._again:
            self._again = None
            # The endpoint may be disconnected already.
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)
        return self.why if self.why != before else ""

    def _happened(self, kind: int, value: int, now: float) -> None:
        match kind:
            case zmq.EVENT_DISCONNECTED:
                self.connected = False
                # Connect again, unless ZeroMQ reports that it retries; after malformed bytes it does not.
                self._again = now + RETRY_S
            case zmq.EVENT_CONNECT_RETRIED:
                self._again = None
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.why, self._again = "", None
                self.connections += 1
                self.connected = True
            case _:
                self.why, self.connected = self._reason(kind, value), False
                if kind in _GIVES_UP:
                    self._again = now + RETRY_S

    def reconnected(self) -> bool:
        """Return whether the connection was replaced since the last call.

        Messages under way on the old connection, in either direction, may be lost, and ZeroMQ does not report
        it.
        """
        before, self._known = self._known, self.connections
        return 0 < before < self.connections

    def close(self) -> None:
        """Stop watching; call it before the socket itself is closed."""
        self._socket.disable_monitor()
        self._monitor.close()

    def _reason(self, event: int, value: int) -> str:
        server, keys = self._server, self._keys
        if keys is None:
            return (
                f"{server} asks for keys, and this process has none; set security.encrypt and security.keys as they "
                "are set there"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value != REFUSED_FOR_GOOD:
            return f"{server} takes no more connections just now; this process goes on trying"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and keys.server_role == "broker":
            return (
                f"{server} {REFUSED_KEY} ({keys.own.public.decode()[:8]}... in {keys.folder}): its keys folder does "
                "not list it; bring this host's keys from there (`offbeat keys bundle`), or our .pub file to there"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"{server} {REFUSED_KEY} ({keys.own.public.decode()[:8]}... in {keys.folder}): the broker has not "
                "told it this key yet, or tells it no more; this process goes on trying"
            )
        if (
            event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        ):
            return f"{server} does not encrypt, and this process does; set security.encrypt the same for both"
        if keys.told:
            return (
                f"{server} ended the handshake: as a rule its key is not the one that the broker told us "
                f"({keys.server.decode()[:8]}...), because a different process listens there; look at "
                "generator.endpoint and generator.advertised_host of its host"
            )
        return (
            f"{server} ended the handshake: as a rule its key is not the one in {keys.folder} "
            f"({keys.server_role}.pub, {keys.server.decode()[:8]}...), or it does not encrypt; copy "
            f"{keys.server_role}.pub from its keys folder, and set security.encrypt the same for both"
        )
