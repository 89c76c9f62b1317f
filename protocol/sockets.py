"""ZeroMQ sockets with the limits of this protocol, and a peer's connection to the broker over them.

`AsyncSocket` drives a socket on an asyncio loop. `AsyncLink` is a peer's connection for such a loop, `ThreadLink` one
with a thread of its own, and `LoopLink` one for code that blocks in the process of all others (`protocol.direct`). The
peer's side without sockets is `protocol.session`.
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

from protocol.codec import MAX_BODY_BYTES, AnyMessage, Buffer, Frames, enclose, encode, messages_in
from protocol.direct import DirectConnection, is_direct
from protocol.errors import LinkDown
from protocol.messages.fields import RunEnd
from protocol.messages.peers import Goodbye, Heartbeat, Hello, Refused, Welcome
from protocol.security.client import HANDSHAKE_MS, ClientKeys, HandshakeWatch, unguessable_id
from protocol.security.keys import KeyRole
from protocol.session import Progress, Session

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
CONNECT_MS = 4_000
"""Longest attempt to connect. The kernel doubles the time between its own tries, so after a minute without a line it
would be silent for half a minute more."""

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
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
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
                message = self._receive_once()
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

    def _receive_once(self) -> tuple[Any, ...]:
        """Receive a message, and return the arguments for the handler.

        Raises:
            zmq.Again: there is none.
        """
        return (self._socket.recv_multipart(_AGAIN),)


def connect(
    endpoint: str, identity: str, keys: ClientKeys | None, server: KeyRole, on_frames: OnFrames
) -> tuple[AsyncSocket | DirectConnection, HandshakeWatch | DirectConnection]:
    """Connect to a server, and return the connection and the watch of its handshakes.

    Args:
        identity: name of this peer.
        server: role of the server, for errors.
        on_frames: called with the frames of every message.
    """
    if is_direct(endpoint):
        direct = DirectConnection(endpoint, identity, on_frames)
        return direct, direct
    socket = dealer(zmq.Context.instance(), identity, keys)
    watch = HandshakeWatch(socket, endpoint, keys, server)
    socket.connect(endpoint)
    return AsyncSocket(socket, on_frames, watch), watch


TICK_S = 0.1
AHEAD_S = 0.5
"""Time by which a heartbeat goes ahead of long messages, so that it shares no packet with them."""

Inbox = tuple[AnyMessage, list[bytes]] | Exception | None
OnMessage = Callable[[AnyMessage, list[bytes]], None]


class AsyncLink:
    """A peer's connection to the broker on an asyncio loop. It joins, sends heartbeats and rejoins by itself.

    Args:
        on_message: called with every message but Welcome and Heartbeat, and the frames behind its header.
        on_join: called after each Welcome, so that the owner can announce again what it has (credit,
            unacknowledged segments).
        progress: called for the content of each heartbeat.
        on_failure: called once, with the reason, if the link ends by an error. Without heartbeats the broker
            will take this peer for dead, so its role has to end.
        keys: keys folder of an encrypted run; None: nothing is encrypted.
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
        self._held: list[Frames] | None = None
        """Messages that wait until a heartbeat with the trouble of the path has gone ahead; None: none has to."""
        self._socket, self._watch = connect(endpoint, hello.peer, own, "broker", self._received)
        self._ticker = asyncio.create_task(self._tick(), name="broker link")

    def send(self, message: AnyMessage, body: bytes | None = None) -> None:
        self.send_frames(encode(message, body))

    def send_frames(self, frames: Frames) -> None:
        """Send a message that is already encoded."""
        if self._held is not None:
            self._held.append(frames)
        else:
            self._send_now(frames)

    def _send_now(self, frames: Frames) -> None:
        self.session.sent(sum(map(len, frames)), time.monotonic())
        self._socket.send(frames)

    def _tell_trouble_first(self) -> None:
        """Let a heartbeat say what is wrong with the path before the next long message blocks it again."""
        log.error("%s", self.session.long.trouble)
        if self._held is None:
            asyncio.get_running_loop().call_later(AHEAD_S, self._release)
        # What an earlier join has left is announced anew.
        self._held = []
        self._send_now(encode(self.session.heartbeat(self._progress)))

    def _release(self) -> None:
        held, self._held = self._held, None
        for frames in held or ():
            self._send_now(frames)

    async def joined(self, timeout_s: float, unless: asyncio.Event | None = None) -> None:
        """Wait for the first Welcome.

        Args:
            unless: ends the wait, too: whoever waits is to end.

        Raises:
            LinkDown: no Welcome came in time, or the link has ended; the text names the endpoint or the
                error.
        """
        events = (self._joined, unless)
        waits = [asyncio.create_task(event.wait()) for event in events if event is not None]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            raise LinkDown(no_answer(self._endpoint, timeout_s, self._watch.why or self._refused))
        if self._failure:
            raise LinkDown(self._failure)

    async def close(self, reason: str = "", then: RunEnd = "") -> None:
        """Say Goodbye, with the reason and what becomes of the run, and close the connection."""
        self._ticker.cancel()
        # If too many messages wait, the Goodbye is left out; the broker will find out by the silence.
        with contextlib.suppress(LinkDown):
            self._release()
            self.send(Goodbye(reason=reason, then=then))
        self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        for message, rest in messages_in(frames, "the broker"):
            try:
                self._take_message(message, rest)
            except Exception:
                # The other messages that came with it are still handled.
                log.exception("%s could not be handled", type(message).__name__)

    def _take_message(self, message: AnyMessage, rest: list[bytes]) -> None:
        if isinstance(message, Refused):
            self._refused = message.message
        if self.session.received(message, time.monotonic()):
            self._joined.set()
            if self.session.long.trouble:
                self._tell_trouble_first()
            self._on_join()
        # The session has noted the answers to Hello and Heartbeat; the owner needs neither.
        elif not isinstance(message, Heartbeat | Welcome):
            self._on_message(message, rest)

    async def _tick(self) -> None:
        try:
            while True:
                if self._watch.reconnected():
                    self.session.reconnected(time.monotonic())
                for message in self.session.due(time.monotonic(), self._progress):
                    self._send_now(encode(message))
                await asyncio.sleep(TICK_S)
        except Exception as error:
            log.critical("the link to %s has ended", self._endpoint, exc_info=True)
            self._failure = f"the link to the broker at {self._endpoint} has ended: {error!r}"
            self._joined.set()
            self._on_failure(self._failure)


class ThreadLink:
    """A peer's connection to the broker in its own thread, for a role whose main thread computes.

    Messages arrive in ``inbox``, a queue of (message, frames behind the header). None marks each join and
    rejoin. An exception is the last item: it has ended the thread, and the reader of the inbox should raise
    it. ``trouble`` says why the broker does not admit this peer, if it said so, and ``refused`` is the fatal
    refusal that said it, if it was one.

    Args:
        progress: called in the link's thread for the content of each heartbeat.
        keys: keys folder of an encrypted run; None: nothing is encrypted.
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
        self.refused: Refused | None = None
        self._keys = _broker_keys(keys, hello)
        self.inbox: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
        self.session = Session(hello, time.monotonic())
        self._endpoint, self._progress = endpoint, progress
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._wake_address = f"inproc://link-{id(self)}"
        # Invariant: any thread appends to the outbox, and only the link's thread removes from it.
        self._outbox: deque[tuple[Frames, int | None]] = deque()
        self._stop, self._rejoin_asked = threading.Event(), threading.Event()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind(self._wake_address)
        # Invariant: a ZeroMQ socket serves one thread at a time, so `_wake_in` sends under this lock only.
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="broker link", daemon=True)
        self._thread.start()

    def send(self, message: AnyMessage, body: bytes | None = None, *, join: int | None = None) -> None:
        """Queue a message; may be called from any thread.

        Args:
            join: number of the join that the message belongs to, counted by the None items of the inbox. If
                the link joins again before the message leaves, the message is left out, because the broker
                would count it for the later join.
        """
        self.send_frames(encode(message, body), join=join)

    def send_frames(self, frames: Frames, *, join: int | None = None) -> None:
        """Queue a message that is already encoded; see `send`."""
        self._outbox.append((frames, join))
        self._wake()

    def rejoin(self) -> None:
        """Join again, after all queued messages, so that the broker repeats what it knows."""
        self._rejoin_asked.set()
        self._wake()

    def wait(self, seconds: float) -> None:
        """Wait while messages may arrive."""
        time.sleep(seconds)

    def close(self, reason: str = "", then: RunEnd = "") -> None:
        """Say Goodbye, with the reason and what becomes of the run, and end the thread."""
        self.send(Goodbye(reason=reason, then=then))
        self._stop.set()
        self._wake()
        self._thread.join()
        self._wake_in.close()

    def _wake(self) -> None:
        # A full queue of wake-ups wakes the thread just as well.
        with self._wake_lock, contextlib.suppress(zmq.Again):
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
        """Send and receive until `close` is called."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        leaving: deque[Sequence[Buffer]] = deque()
        while True:
            ready = dict(poller.poll(int(TICK_S * 1000)))
            if wake in ready:
                _drain(wake)
            if why := watch.look(time.monotonic()):
                log.error("%s", why)
                self.trouble = why
            # Rejoin before anything is read that came over the new connection.
            if watch.reconnected() or self._rejoin_asked.is_set():
                self._rejoin_asked.clear()
                self.session.reconnected(time.monotonic())
            if socket in ready:
                self._receive(socket)
            for message in self.session.due(time.monotonic(), self._progress):
                self._outbox.append((encode(message), None))
            stopping = self._stop.is_set()
            said = [self._outbox.popleft() for _ in range(len(self._outbox))]
            enclosed = enclose([frames for frames, join in said if self._holds(join)])
            if enclosed:
                self.session.sent(sum(len(part) for frames in enclosed for part in frames), time.monotonic())
            leaving.extend(enclosed)
            while leaving:
                try:
                    socket.send_multipart(leaving[0], zmq.DONTWAIT)
                except zmq.Again:
                    break
                leaving.popleft()
            if stopping:
                return

    def _holds(self, join: int | None) -> bool:
        return join is None or (self.session.joined and join == self.session.joins)

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            for message, rest in messages_in(frames, "the broker"):
                # The frames have been checked, so the prelude has its four bytes.
                self.session.minor = frames[0][3]
                self._take_message(message, rest)

    def _take_message(self, message: AnyMessage, rest: list[bytes]) -> None:
        if self.session.received(message, time.monotonic()):
            self.trouble, self.refused = "", None
            if self.session.long.trouble:
                log.error("%s", self.session.long.trouble)
            self.inbox.put(None)
        elif not isinstance(message, Heartbeat | Welcome):
            if isinstance(message, Refused) and message.fatal:
                self.trouble, self.refused = message.message, message
            self.inbox.put((message, rest))


class LoopInbox:
    """Messages for code that blocks: whoever waits for one lets the event loop run meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._items, self._arrived = loop, deque[Inbox](), asyncio.Event()

    def put(self, item: Inbox) -> None:
        self._items.append(item)
        self._arrived.set()

    def get(self, timeout: float) -> Inbox:
        """Return the next item. Let the loop run until it is there.

        Raises:
            queue.Empty: nothing came within ``timeout`` seconds.
        """
        if not self._items:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                self._loop.run_until_complete(asyncio.wait_for(self._arrived.wait(), timeout))
        return self.get_nowait()

    def get_nowait(self) -> Inbox:
        """Return the next item.

        Raises:
            queue.Empty: nothing is here.
        """
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class LoopLink:
    """A peer's connection to the broker on the loop of all roles of a process, for the role that blocks.

    It is used like a `ThreadLink`, from the thread that may run the loop; only `send` and `send_frames` may be called
    from others. The loop stands while its owner computes, and runs while its owner waits.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        loop: asyncio.AbstractEventLoop,
        progress: Callable[[], Progress] = Progress,
        keys: Path | None = None,
    ) -> None:
        self.trouble = ""
        self.refused: Refused | None = None
        self.inbox = LoopInbox(loop)
        self._loop = loop

        async def link() -> AsyncLink:
            return AsyncLink(
                endpoint,
                hello,
                self._received,
                on_join=self._joined,
                progress=progress,
                on_failure=lambda reason: self.inbox.put(LinkDown(reason)),
                keys=keys,
            )

        self._link = loop.run_until_complete(link())

    @property
    def session(self) -> Session:
        """State of the connection."""
        return self._link.session

    def send(self, message: AnyMessage, body: bytes | None = None, *, join: int | None = None) -> None:
        """Queue a message; see `ThreadLink.send`."""
        self.send_frames(encode(message, body), join=join)

    def send_frames(self, frames: Frames, *, join: int | None = None) -> None:
        """Queue a message that is already encoded; see `ThreadLink.send`."""
        self._loop.call_soon_threadsafe(self._send_if_joined, frames, join)

    def rejoin(self) -> None:
        """Join again, after all queued messages, so that the broker repeats what it knows."""
        self._loop.call_soon_threadsafe(lambda: self.session.reconnected(time.monotonic()))

    def wait(self, seconds: float) -> None:
        """Let the loop run for a while."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def close(self, reason: str = "", then: RunEnd = "") -> None:
        """Say Goodbye, with the reason and what becomes of the run, and close the connection."""
        self._loop.run_until_complete(self._link.close(reason, then))

    def _send_if_joined(self, frames: Frames, join: int | None) -> None:
        if join is None or (self.session.joined and join == self.session.joins):
            self._link.send_frames(frames)

    def _joined(self) -> None:
        self.trouble, self.refused = "", None
        self.inbox.put(None)

    def _received(self, message: AnyMessage, rest: list[bytes]) -> None:
        if isinstance(message, Refused) and message.fatal:
            self.trouble, self.refused = message.message, message
        self.inbox.put((message, rest))


BlockingLink = ThreadLink | LoopLink
"""Connection of a role whose main thread computes."""


def _drain(socket: "zmq.Socket[bytes]") -> None:
    while True:
        try:
            socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return


def no_answer(endpoint: str, timeout_s: float, trouble: str) -> str:
    """Return the error text for a caller that waited in vain for a broker."""
    return trouble or (
        f"no broker answered at {endpoint} within {timeout_s:g} s; is it started, and is the port right?"
    )


def _broker_keys(folder: Path | None, hello: Hello) -> ClientKeys | None:
    return None if folder is None else ClientKeys.read(folder, hello.role, hello.peer, "broker")
