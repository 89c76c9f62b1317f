"""ZeroMQ sockets of a peer: one driver for asyncio, one for a thread.

Plain sockets drained in batches, not ``zmq.asyncio``: half the cost per small message, and no receive is ever
cancelled. A socket belongs to one thread.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import zmq

from protocol.codec import MAX_BODY_BYTES, Buffer, Frames, decode, encode
from protocol.errors import LinkDown, ProtocolError
from protocol.messages import AnyMessage, Goodbye, Heartbeat, Hello, Refused, Welcome
from protocol.security import HANDSHAKE_MS, ClientKeys, HandshakeWatch, unguessable_id
from protocol.session import Progress, Session

log = logging.getLogger(__name__)

OUTBOX_LIMIT = 100_000
COPIED_BYTES = 65_536
KEPT_BYTES = 8_192
"""From this size on ZeroMQ has a received frame in memory of its own, which may be kept without keeping more."""
BODIES = 3
"""Frames before the first body: routing id, prelude, header."""
TICK_S = 0.1
LOOK_S = 0.25
PUMP_BATCH = 64
LINGER_MS = 2_000

_SNDMORE = int(zmq.SNDMORE)
_AGAIN = int(zmq.DONTWAIT)
_send: Callable[..., object] = zmq.backend.Socket.send
_recv: Callable[..., "zmq.Frame"] = zmq.backend.Socket.recv
_copied: Callable[..., bytes] = zmq.backend.Socket.recv

Inbox = tuple[AnyMessage, list[bytes]] | Exception | None
OnMessage = Callable[[AnyMessage, list[bytes]], None]
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

    ``watch`` looks after its handshakes, if it connects.
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
        self._outbox: deque[Sequence[Buffer]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._scheduled = False
        self._loop.add_reader(socket.fileno(), self._pump)
        self._schedule()
        self._look()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send, or keep until the socket takes it; raises LinkDown when too much is kept."""
        if len(self._outbox) >= OUTBOX_LIMIT:
            raise LinkDown(f"{OUTBOX_LIMIT} messages wait for a peer that takes none")
        self._outbox.append(frames)
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
        # batch leave together, as each that leaves alone wakes ZeroMQ's thread.
        self._scheduled = False
        if self._closed:
            return
        self._flush()
        for _ in range(PUMP_BATCH):
            try:
                message = self._take()
            except zmq.Again:
                return
            try:
                self._handle(*message)
            except Exception:  # the rest would stay unread until the next message comes
                log.exception("a message could not be handled")
            if self._closed:
                return
        self._schedule()

    def _take(self) -> tuple[Any, ...]:
        """Receive a message; returns what is passed on of it, raises Again when there is none."""
        return (self._socket.recv_multipart(_AGAIN),)


class AsyncLink:
    """A peer's connection to the broker on an asyncio loop: joins, beats, rejoins by itself.

    ``on_message`` gets every message but Welcome; ``on_join`` is called after each Welcome, so that the owner
    can announce again what it has (credit, unacknowledged segments). ``on_failure`` is told, once, why the link
    can go on no longer; without its heartbeats this peer will be taken for dead, so its role has to end.
    ``keys`` is the keys folder of an encrypted run.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        on_message: OnMessage,
        *,
        on_join: Callable[[], None] = lambda: None,
        progress: Callable[[], Progress] = Progress,
        on_failure: Callable[[str], None] = lambda reason: None,
        keys: Path | None = None,
    ) -> None:
        own = _broker_keys(keys, hello)
        self.session = Session(hello, time.monotonic())
        self._on_message, self._on_join, self._progress = on_message, on_join, progress
        self._on_failure, self._failure, self._refused = on_failure, "", ""
        self._joined = asyncio.Event()
        self._endpoint = endpoint
        socket = dealer(zmq.Context.instance(), hello.peer, own)
        self._watch = HandshakeWatch(socket, endpoint, own, "broker")
        socket.connect(endpoint)
        self._socket = AsyncSocket(socket, self._received, self._watch)
        self._ticker = asyncio.create_task(self._tick(), name="broker link")

    def send(self, message: AnyMessage, body: bytes | None = None) -> None:
        self._socket.send(encode(message, body))

    def send_frames(self, frames: Frames) -> None:
        self._socket.send(frames)

    async def joined(self, timeout_s: float) -> None:
        """Wait for the first Welcome; raises LinkDown naming the endpoint, or what has ended the link."""
        try:
            await asyncio.wait_for(self._joined.wait(), timeout_s)
        except TimeoutError:
            raise LinkDown(no_answer(self._endpoint, timeout_s, self._watch.why or self._refused)) from None
        if self._failure:
            raise LinkDown(self._failure)

    async def close(self, reason: str = "") -> None:
        self._ticker.cancel()
        with contextlib.suppress(LinkDown):  # too much is waiting; the broker will miss us
            self.send(Goodbye(reason=reason))
        self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        try:
            message, rest = decode(frames)
        except ProtocolError as error:
            log.error("message from the broker refused: %s", error)
            return
        if isinstance(message, Refused):
            self._refused = message.message
        if self.session.received(message, time.monotonic()):
            self._joined.set()
            self._on_join()
        elif not isinstance(message, Heartbeat | Welcome):  # answers to ours; the session has noted them
            self._on_message(message, list(rest))  # type: ignore[arg-type]

    async def _tick(self) -> None:
        try:
            while True:
                if self._watch.reconnected():
                    self.session.reconnected(time.monotonic())
                for message in self.session.due(time.monotonic(), self._progress()):
                    self.send(message)
                await asyncio.sleep(TICK_S)
        except Exception as error:
            log.critical("the link to %s has ended", self._endpoint, exc_info=True)
            self._failure = f"the link to the broker at {self._endpoint} has ended: {error!r}"
            self._joined.set()
            self._on_failure(self._failure)


class ThreadLink:
    """A peer's connection to the broker in a thread of its own, for a role whose main thread computes.

    Messages arrive in ``inbox``, a queue of (message, frames behind the header); None marks each (re)join, and
    an exception is the last item: the thread has ended by it, and whoever reads the inbox should raise it.
    ``keys`` is the keys folder of an encrypted run; ``trouble`` says why the broker does not take us, if it said so.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        progress: Callable[[], Progress] = Progress,
        keys: Path | None = None,
    ) -> None:
        self.trouble = ""
        self._keys = _broker_keys(keys, hello)
        self.inbox: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
        self.session = Session(hello, time.monotonic())
        self._endpoint, self._progress = endpoint, progress
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._wake_address = f"inproc://link-{id(self)}"
        self._outbox: deque[Frames] = deque()
        self._stop, self._again = threading.Event(), threading.Event()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind(self._wake_address)
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="broker link", daemon=True)
        self._thread.start()

    def send(self, message: AnyMessage, body: bytes | None = None) -> None:
        """Queue a message; may be called from any thread."""
        self._outbox.append(encode(message, body))
        self._wake()

    def rejoin(self) -> None:
        """Join once more, behind all that was sent: the broker then says anew what it knows."""
        self._again.set()
        self._wake()

    def close(self, reason: str = "") -> None:
        self.send(Goodbye(reason=reason))
        self._stop.set()
        self._wake()
        self._thread.join()
        self._wake_in.close()

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(zmq.Again):  # wake-ups are queued already
            self._wake_in.send(b"", zmq.DONTWAIT)

    def _run(self) -> None:
        socket = dealer(self._context, self.session.hello.peer, self._keys)
        wake = self._context.socket(zmq.PAIR)
        watch = HandshakeWatch(socket, self._endpoint, self._keys, "broker")
        try:
            socket.connect(self._endpoint)
            wake.connect(self._wake_address)
            self._exchange(socket, wake, watch)
        except Exception as error:
            log.critical("the link to %s has ended", self._endpoint, exc_info=True)
            self.inbox.put(error)
        finally:
            watch.close()
            socket.close()
            wake.close()

    def _exchange(
        self, socket: "zmq.Socket[bytes]", wake: "zmq.Socket[bytes]", watch: HandshakeWatch
    ) -> None:
        """Until told to stop."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(TICK_S * 1000)))
            if wake in ready:
                _drain(wake)
            if why := watch.look(time.monotonic()):
                log.error("%s", why)
                self.trouble = why
            if watch.reconnected() or self._again.is_set():  # before what comes over it is read
                self._again.clear()
                self.session.reconnected(time.monotonic())
            if socket in ready:
                self._receive(socket)
            for message in self.session.due(time.monotonic(), self._progress()):
                self._outbox.append(encode(message))
            stopping = self._stop.is_set()
            while self._outbox:
                try:
                    socket.send_multipart(self._outbox[0], zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._outbox.popleft()
            if stopping:
                return

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                message, rest = decode(frames)
            except ProtocolError as error:
                log.error("message from the broker refused: %s", error)
                continue
            if self.session.received(message, time.monotonic()):
                self.trouble = ""
                self.inbox.put(None)
            elif not isinstance(message, Heartbeat | Welcome):
                if isinstance(message, Refused) and message.fatal:
                    self.trouble = message.message
                self.inbox.put((message, list(rest)))  # type: ignore[arg-type]


def _drain(socket: "zmq.Socket[bytes]") -> None:
    while True:
        try:
            socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return


def no_answer(endpoint: str, timeout_s: float, trouble: str) -> str:
    """What to tell whoever waited in vain for a broker."""
    return trouble or (
        f"no broker answered at {endpoint} within {timeout_s:g} s; is it started, and is the port right?"
    )


def _broker_keys(folder: Path | None, hello: Hello) -> ClientKeys | None:
    return None if folder is None else ClientKeys.read(folder, hello.role, hello.peer, "broker")
