"""ZeroMQ sockets with our limits, and a driver for them on an asyncio loop.

Plain sockets drained in batches, not ``zmq.asyncio``: half the cost per small message, and no receive is ever
cancelled. A socket belongs to one thread.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq

from protocol.codec import MAX_BODY_BYTES, Buffer
from protocol.envelopes import enclose
from protocol.errors import LinkDown
from protocol.security.client import HANDSHAKE_MS, ClientKeys, HandshakeWatch, unguessable_id

log = logging.getLogger(__name__)

OUTBOX_LIMIT = 100_000
COPIED_BYTES = 65_536
KEPT_BYTES = 8_192
"""From this size on ZeroMQ has a received frame in memory of its own, which may be kept without keeping more."""
BODIES = 3
"""Frames before the first body: routing id, prelude, header."""
LOOK_S = 0.25
PUMP_BATCH, PUMP_S = 64, 0.01
SAID_LIMIT = 1_024
"""Messages that are put into envelopes at a time."""
LINGER_MS = 2_000

_SNDMORE = int(zmq.SNDMORE)
_AGAIN = int(zmq.DONTWAIT)
_send: Callable[..., object] = zmq.backend.Socket.send
_recv: Callable[..., "zmq.Frame"] = zmq.backend.Socket.recv
_copied: Callable[..., bytes] = zmq.backend.Socket.recv

OnFrames = Callable[[Any], None]
"""Gets a list of bytes; of a ROUTER, large bodies are views."""


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", identity: str, keys: ClientKeys | None = None
) -> "zmq.Socket[bytes]":
    """A DEALER with our limits: bounded frames, quick reconnect, ZMTP heartbeats that find a frozen host.

    With keys it is encrypted, and its routing id is known to the other side alone.
    """
    socket = context.socket(zmq.DEALER, LeanSocket)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode() if keys is None else unguessable_id())
    _limit(socket)
    if keys is not None:
        keys.apply(socket)
    return socket


def router(context: "zmq.Context[zmq.Socket[bytes]]") -> "LeanRouter":
    """A ROUTER with our limits; a peer that comes back under its old name takes the name over."""
    socket = cast("LeanRouter", context.socket(zmq.ROUTER, LeanRouter))
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _limit(socket)
    return socket


def _limit(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES + 1024)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5_000)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.RCVHWM, 10_000)


class LeanSocket(zmq.Socket[bytes]):
    """The same socket, with half the work around each frame: plain integers for flags, no check of types.

    Large frames are handed over without a copy; they must be bytes, which nobody can change afterwards. What a
    `LeanRouter` has kept is handed back to ZeroMQ as it is.
    """

    def send_multipart(  # type: ignore[override]
        self, msg_parts: Sequence[Buffer], flags: int = 0, copy: bool = True, track: bool = False
    ) -> None:
        flags = int(flags)
        more, last = flags | _SNDMORE, msg_parts[-1]
        for part in msg_parts[:-1]:
            if type(part) is bytes and len(part) < COPIED_BYTES:
                _send(self, part, more)
            else:
                _send(self, part if type(part) is bytes else _frame(part), more, False)
        if type(last) is bytes and len(last) < COPIED_BYTES:
            _send(self, last, flags)
        else:
            _send(self, last if type(last) is bytes else _frame(last), flags, False)

    def recv_multipart(  # type: ignore[override]
        self, flags: int = 0, copy: bool = True, track: bool = False
    ) -> list[bytes]:
        flags, parts = int(flags), []
        while True:
            frame = _recv(
                self, flags, False
            )  # to ask a frame whether more follow is cheaper than to ask the socket
            parts.append(frame.bytes)
            if not frame.more:
                return parts


class LeanRouter(LeanSocket):
    """A ROUTER whose large bodies stay where ZeroMQ has them: views of its frames, to be sent on without a copy."""

    def recv_multipart(  # type: ignore[override]
        self, flags: int = 0, copy: bool = True, track: bool = False
    ) -> list[Buffer]:
        return self.recv_behind([_copied(self, int(flags))])  # a routing id never comes alone

    def recv_behind(self, parts: list[Buffer]) -> list[Buffer]:
        """The rest of a message whose first part has been received; parts of a message come together."""
        while True:
            frame = _recv(self, _AGAIN, False)
            large = len(parts) >= BODIES and len(frame) >= KEPT_BYTES
            parts.append(frame.buffer if large else frame.bytes)
            if not frame.more:
                return parts


def _frame(part: Buffer) -> object:
    """What ZeroMQ is given for a part that it is not to copy."""
    kept = part.obj if type(part) is memoryview else part
    return kept if isinstance(kept, zmq.Frame) and len(kept) == len(part) else bytes(part)


class AsyncSocket:
    """A ZeroMQ socket on an asyncio loop: ``on_frames`` is called for every multipart message.

    What is sent in one turn of the loop leaves together (`protocol.envelopes`). ``watch`` looks after its handshakes,
    if it connects.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: OnFrames,
        watch: HandshakeWatch | None = None,
    ) -> None:
        self._socket = socket
        self._handle: Callable[..., None] = on_frames
        self._watch = watch
        self._addressed = socket.type == zmq.ROUTER
        self._said: list[Sequence[Buffer]] = []
        """In this turn; of `_outbox` from the next look on."""
        self._outbox: deque[Sequence[Buffer]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._scheduled = False
        self.pumping = False
        """Whether messages are being handled: `after_batch` will be called."""
        self.after_batch: Callable[[], None] = lambda: None
        """Called when all that has come is handled; what it sends leaves at once."""
        self._loop.add_reader(socket.fileno(), self._pump)
        self._schedule()
        self._look()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send, or keep until the socket takes it; raises LinkDown when too much is kept."""
        if len(self._said) >= SAID_LIMIT:
            self._flush()
        if len(self._outbox) >= OUTBOX_LIMIT:
            raise LinkDown(f"{OUTBOX_LIMIT} messages wait for a peer that takes none")
        self._said.append(frames)
        if not self._scheduled:
            self._schedule()

    def close(self) -> None:
        """Hand what is left to ZeroMQ (it lingers shortly) and close."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        if self._watch is not None:
            self._watch.close()
        self._socket.close()

    def _look(self) -> None:
        if self._watch is None or self._closed:
            return
        if why := self._watch.look(time.monotonic()):
            log.error("%s", why)
        self._loop.call_later(LOOK_S, self._look)

    def _schedule(self) -> None:
        if not self._scheduled:  # one look serves all that is sent meanwhile
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _flush(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self._outbox.extend(enclose(said, addressed=self._addressed))
        while self._outbox:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError as error:  # ROUTER_MANDATORY is off, so this is a closed context
                log.warning("send failed: %s", error)
            self._outbox.popleft()

    def _pump(self) -> None:
        # The descriptor is edge-triggered: drain until empty, and look again after every send. A batch at a
        # time, so that a flood of messages starves neither timers nor other sockets of the loop; the answers to a
        # batch leave together, as each that leaves alone wakes ZeroMQ's thread, and before the loop goes round again.
        if self._closed:
            return
        self._scheduled = self.pumping = True
        try:
            self._flush()
            idle = self._receive()
        finally:
            self._scheduled = self.pumping = False
        if not idle and not self._closed:
            self._schedule()

    def _receive(self) -> bool:
        """Handle what has come and send the answers; False if there may be more."""
        full, until = False, time.monotonic() + PUMP_S
        for _ in range(PUMP_BATCH):
            if time.monotonic() > until:
                break
            try:
                message = self._take()
            except zmq.Again:
                self._guarded(self.after_batch)
                if self._closed or not (self._outbox or self._said):
                    return True
                if full:
                    # The descriptor tells when it takes more, unless the look just now has taken its edge.
                    return not self._socket.poll(0, zmq.POLLOUT)
                self._flush()
                full = bool(self._outbox)
                continue
            self._guarded(self._handle, *message)
            if self._closed:
                return True
        self._guarded(self.after_batch)
        return False

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # the rest would stay unread until the next message comes
            log.exception("a message could not be handled")

    def _take(self) -> tuple[Any, ...]:
        """Receive a message; returns what is passed on of it, raises Again when there is none."""
        return (self._socket.recv_multipart(_AGAIN),)
