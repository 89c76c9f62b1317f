"""A peer's connection to the broker: `AsyncLink` for an asyncio loop, `ThreadLink` with its own thread."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from protocol.codec import Buffer, Frames, encode
from protocol.envelopes import enclose, messages_in
from protocol.errors import LinkDown
from protocol.messages.any_message import AnyMessage
from protocol.messages.peers import Goodbye, Heartbeat, Hello, Refused, Welcome
from protocol.security.client import ClientKeys, HandshakeWatch
from protocol.session import Progress, Session
from protocol.sockets import AsyncSocket, dealer

log = logging.getLogger(__name__)

TICK_S = 0.1

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
        socket = dealer(zmq.Context.instance(), hello.peer, own)
        self._watch = HandshakeWatch(socket, endpoint, own, "broker")
        socket.connect(endpoint)
        self._socket = AsyncSocket(socket, self._received, self._watch)
        self._ticker = asyncio.create_task(self._tick(), name="broker link")

    def send(self, message: AnyMessage, body: bytes | None = None) -> None:
        self._socket.send(encode(message, body))

    def send_frames(self, frames: Frames) -> None:
        """Send a message that is already encoded."""
        self._socket.send(frames)

    async def joined(self, timeout_s: float) -> None:
        """Wait for the first Welcome.

        Raises:
            LinkDown: no Welcome came in time, or the link has ended; the text names the endpoint or the
                error.
        """
        try:
            await asyncio.wait_for(self._joined.wait(), timeout_s)
        except TimeoutError:
            raise LinkDown(no_answer(self._endpoint, timeout_s, self._watch.why or self._refused)) from None
        if self._failure:
            raise LinkDown(self._failure)

    async def close(self, reason: str = "") -> None:
        self._ticker.cancel()
        # If too many messages wait, the Goodbye is left out; the broker will find out by the silence.
        with contextlib.suppress(LinkDown):
            self.send(Goodbye(reason=reason))
        self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        for message, rest in messages_in(frames, "the broker"):
            try:
                self._take(message, rest)
            except Exception:
                # The other messages that came with it are still handled.
                log.exception("%s could not be handled", type(message).__name__)

    def _take(self, message: AnyMessage, rest: list[bytes]) -> None:
        if isinstance(message, Refused):
            self._refused = message.message
        if self.session.received(message, time.monotonic()):
            self._joined.set()
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
                    self.send(message)
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

    def close(self, reason: str = "") -> None:
        self.send(Goodbye(reason=reason))
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
            leaving.extend(enclose([frames for frames, join in said if self._holds(join)]))
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
                self._take(message, rest)

    def _take(self, message: AnyMessage, rest: list[bytes]) -> None:
        if self.session.received(message, time.monotonic()):
            self.trouble, self.refused = "", None
            self.inbox.put(None)
        elif not isinstance(message, Heartbeat | Welcome):
            if isinstance(message, Refused) and message.fatal:
                self.trouble, self.refused = message.message, message
            self.inbox.put((message, rest))


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
