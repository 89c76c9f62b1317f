"""ZeroMQ sockets with the limits of this protocol, and a driver for them on an asyncio loop.

The driver drains plain sockets in batches and does not use ``zmq.asyncio``: a small message costs half as
much, and no receive is ever cancelled. A socket belongs to one thread.
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
"""Size from which ZeroMQ gives a received frame its own memory, so that keeping it keeps nothing else."""
BODIES = 3
"""Number of frames before the first body: routing id, prelude, header."""
LOOK_S = 0.25
PUMP_BATCH, PUMP_S = 64, 0.01
UNSENT_LIMIT = 1_024
"""Upper limit of the messages that wait to be put into envelopes."""
LINGER_MS = 2_000

_SNDMORE = int(zmq.SNDMORE)
_AGAIN = int(zmq.DONTWAIT)
_send: Callable[..., object] = zmq.backend.Socket.send
_recv: Callable[..., "zmq.Frame"] = zmq.backend.Socket.recv
_copied: Callable[..., bytes] = zmq.backend.Socket.recv

OnFrames = Callable[[Any], None]
"""Called with a list of bytes; large bodies from a ROUTER are views."""


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", identity: str, keys: ClientKeys | None = None
) -> "zmq.Socket[bytes]":
    """Create a DEALER with bounded frames, quick reconnects, and ZMTP heartbeats that detect a frozen host.

    With keys it is encrypted, and only the other side knows its routing id.
    """
    socket = context.socket(zmq.DEALER, LeanSocket)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode() if keys is None else unguessable_id())
    _limit(socket)
    if keys is not None:
        keys.apply(socket)
    return socket


def router(context: "zmq.Context[zmq.Socket[bytes]]") -> "LeanRouter":
    """Create a ROUTER with these limits; a peer that comes back under its old name takes the name over."""
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
    """A ZeroMQ socket with half the work per frame: flags are plain integers, and types are not checked.

    Large frames are passed to ZeroMQ without a copy; they must be bytes, which nobody can change afterwards.
    A frame that a `LeanRouter` has kept is passed back to ZeroMQ as it is.
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
            # Receive frames, because asking a frame whether more follow is cheaper than asking the socket.
            frame = _recv(self, flags, False)
            parts.append(frame.bytes)
            if not frame.more:
                return parts


class LeanRouter(LeanSocket):
    """A ROUTER that returns large bodies as views of ZeroMQ's frames, which can be sent on without a copy."""

    def recv_multipart(  # type: ignore[override]
        self, flags: int = 0, copy: bool = True, track: bool = False
    ) -> list[Buffer]:
        # A routing id never comes alone.
        return self.recv_behind([_copied(self, int(flags))])

    def recv_behind(self, parts: list[Buffer]) -> list[Buffer]:
        """Receive the rest of a message whose first parts are given; the parts of a message come together."""
        while True:
            frame = _recv(self, _AGAIN, False)
            large = len(parts) >= BODIES and len(frame) >= KEPT_BYTES
            parts.append(frame.buffer if large else frame.bytes)
            if not frame.more:
                return parts


def _frame(part: Buffer) -> object:
    """Return the object to pass to ZeroMQ for a part that it should not copy."""
    kept = part.obj if type(part) is memoryview else part
    return kept if isinstance(kept, zmq.Frame) and len(kept) == len(part) else bytes(part)


class AsyncSocket:
    """A ZeroMQ socket on an asyncio loop. Messages sent in one turn of the loop leave together, in envelopes.

    Args:
        on_frames: called with the frames of every multipart message.
        watch: watch of the handshakes, for a socket that connects.
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
        self._unsent: list[Sequence[Buffer]] = []
        """Messages sent in this turn of the loop; the next `_flush` moves them to `_outbox`."""
        self._outbox: deque[Sequence[Buffer]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._scheduled = False
        self.pumping = False
        """True while messages are being handled, after which `after_batch` is called."""
        self.after_batch: Callable[[], None] = lambda: None
        """Called after each batch of messages is handled; messages that it sends leave at once."""
        self.after_look: Callable[[], None] = lambda: None
        """Called every `LOOK_S` seconds, after the watch has looked at the handshakes."""
        self._loop.add_reader(socket.fileno(), self._pump)
        self._schedule()
        self._watch_handshakes()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message, which leaves with others of this turn as soon as the socket takes it.

        Raises:
            LinkDown: too many messages wait.
        """
        if len(self._unsent) >= UNSENT_LIMIT:
            self._flush()
        if len(self._outbox) >= OUTBOX_LIMIT:
            raise LinkDown(f"{OUTBOX_LIMIT} messages wait for a peer that takes none")
        self._unsent.append(frames)
        if not self._scheduled:
            self._schedule()

    def close(self) -> None:
        """Pass waiting messages to ZeroMQ, which lingers for `LINGER_MS`, and close."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        if self._watch is not None:
            self._watch.close()
        self._socket.close()

    def _watch_handshakes(self) -> None:
        if self._watch is None or self._closed:
            return
        if why := self._watch.look(time.monotonic()):
            log.error("%s", why)
        self.after_look()
        self._loop.call_later(LOOK_S, self._watch_handshakes)

    def _schedule(self) -> None:
        # One call of `_pump` serves all messages that are sent until then.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _flush(self) -> None:
        if self._unsent:
            said, self._unsent = self._unsent, []
            self._outbox.extend(enclose(said, addressed=self._addressed))
        while self._outbox:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                # ROUTER_MANDATORY is off, so this is a closed context.
                log.warning("send failed: %s", error)
            self._outbox.popleft()

    def _pump(self) -> None:
        # The descriptor is edge-triggered, so drain the socket until it is empty, and look again after every
        # send. Work in batches, so that a flood of messages does not starve timers and other sockets of the
        # loop. Answers to a batch leave together and before the loop goes on, because each send alone wakes
        # ZeroMQ's thread.
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
        """Handle a batch of messages and send the answers; return False if there may be more messages."""
        full, until = False, time.monotonic() + PUMP_S
        for _ in range(PUMP_BATCH):
            if time.monotonic() > until:
                break
            try:
                message = self._take()
            except zmq.Again:
                self._guarded(self.after_batch)
                if self._closed or not (self._outbox or self._unsent):
                    return True
                if full:
                    # The descriptor signals when the socket takes more, unless the check just now used up its
                    # edge.
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
        except Exception:
            # Go on, because the remaining messages would stay unread until the next one comes.
            log.exception("a message could not be handled")

    def _take(self) -> tuple[Any, ...]:
        """Receive a message, and return the arguments for the handler.

        Raises:
            zmq.Again: there is none.
        """
        return (self._socket.recv_multipart(_AGAIN),)
