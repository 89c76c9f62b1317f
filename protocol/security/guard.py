"""The server's half of CURVE: a ZAP handler for handshakes, and sockets that know the key of each message.

By ZAP (ZeroMQ RFC 27) ZeroMQ asks the listening process, over ``inproc://zeromq.zap.01``, whether a key may
connect. The answer has a user id, here the key itself, which comes with each message of that connection. So a
key that is admitted no more is refused on open connections, too, and these are cut.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.security.client import REFUSED_FOR_GOOD, REFUSED_FOR_NOW
from protocol.security.connections import Connection
from protocol.security.handshakes import Admission
from protocol.security.keys import AllowList, KeyRole, Principal, key_pair
from protocol.sockets import AsyncSocket, LeanRouter, router

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
USER_ID = "User-Id"
LOG_EVERY_S = 5.0
NOTICE_S = 1.0
"""Time from the first message under a key that is not admitted to the cut; the peer can learn the reason."""
ADMITS: dict[KeyRole, frozenset[KeyRole]] = {
    "broker": frozenset({"learner", "generator", "actor"}),
    "generator": frozenset({"actor"}),
}

OnGuardedMessage = Callable[[Any, Principal | None], None]


class Guard:
    """Keys, allow-list and ZAP handler of one listening socket; at most one in a ZeroMQ context.

    Args:
        folder: keys folder.
        role, peer: owner of the keys that the socket uses.

    Raises:
        KeysUnusable: the folder lacks these keys, or cannot be read.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, role: KeyRole, peer: str = ""
    ) -> None:
        self._own, self._domain = key_pair(folder, role, peer), role.encode()
        self.admission = Admission(folder, ADMITS[role], time.monotonic())
        self._logged = -LOG_EVERY_S
        handler = context.socket(zmq.ROUTER)
        handler.bind(ZAP_ENDPOINT)
        self._handler = AsyncSocket(handler, self._asked)

    @property
    def public_key(self) -> str:
        """The public key (Z85) that the socket shows to clients."""
        return self._own.public.decode()

    def router(self, context: "zmq.Context[zmq.Socket[bytes]]") -> LeanRouter:
        """Create an encrypted ROUTER for the caller to bind."""
        socket = router(context)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self._domain)
        # Without this, ZeroMQ admits every peer if no handler answers.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return socket

    def sender(self, user_id: str) -> Principal | None:
        """Return the principal whose key a message came under; None if the key is not admitted now."""
        self.admission.reload(time.monotonic())
        return self.admission.sender(user_id)

    def admit(self, allowed: AllowList) -> None:
        """Admit the keys of this list and no others, whatever the folder holds."""
        self.admission.admit(allowed)

    def close(self) -> None:
        """Close the handler; call it after the guarded socket is closed."""
        self._handler.close()

    def _asked(self, frames: list[bytes]) -> None:
        """Answer one ZAP request.

        Frames: routing id, delimiter, version, request id, domain, address, identity, mechanism, key.
        """
        if len(frames) != 9 or frames[2] != ZAP_VERSION:
            log.error("a ZAP request of %d frames is none; ZeroMQ lets its connection wait", len(frames))
            return
        request_id, domain, address, mechanism, key = frames[3], frames[4], frames[5], frames[7], frames[8]
        if domain != self._domain or mechanism != b"CURVE" or len(key) != 32:
            self._answer(frames[0], request_id, REFUSED_FOR_GOOD, "not encrypted", "")
            return
        public, where, now = z85.encode(key).decode(), address.decode("utf-8", "replace"), time.monotonic()
        verdict = self.admission.handshake(public, where, now)
        if verdict.admitted:
            self._answer(frames[0], request_id, 200, "OK", public)
            return
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            count = self.admission.refused.total()
            log.warning(
                "key %s... at %s refused: %s (%d so far)", public[:8], where or "ipc", verdict.why, count
            )
        status = REFUSED_FOR_NOW if verdict.temporary else REFUSED_FOR_GOOD
        self._answer(frames[0], request_id, status, verdict.why, "")

    def _answer(self, route: bytes, request_id: bytes, status: int, text: str, user_id: str) -> None:
        answer = [ZAP_VERSION, request_id, str(status).encode(), text.encode(), user_id.encode(), b""]
        self._handler.send([route, b"", *answer])


class GuardedSocket(AsyncSocket):
    """An AsyncSocket that passes each message on with the principal of its key; None: it is not admitted."""

    def __init__(self, socket: LeanRouter, on_message: OnGuardedMessage, guard: Guard) -> None:
        self._router, self._guard = socket, guard
        self._first: zmq.Frame | None = None
        self._doomed: set[Connection] = set()
        super().__init__(socket, lambda frames: on_message(frames, None))
        self._handle = on_message

    def connection(self) -> Connection | None:
        """Return the connection of the message that is being handled; None if it is unknown."""
        return None if self._first is None else Connection.of(self._first)

    def _take(self) -> tuple[Any, ...]:
        # Only a frame that is not copied has the user id.
        first = self._socket.recv(zmq.DONTWAIT, copy=False)
        frames = self._router.recv_behind([first.bytes])
        try:
            sender = self._guard.sender(str(first.get(USER_ID)))
        except zmq.ZMQError:
            sender = None
        self._first = first
        if sender is None:
            self._doom(Connection.of(first))
        return frames, sender

    def _doom(self, connection: Connection | None) -> None:
        if connection is None or connection in self._doomed:
            return
        self._doomed.add(connection)
        asyncio.get_running_loop().call_later(NOTICE_S, self._cut, connection)

    def _cut(self, connection: Connection) -> None:
        self._doomed.discard(connection)
        if not self._closed and connection.cut():
            log.info("a connection was cut: its key is admitted no more")
