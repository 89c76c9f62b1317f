"""A peer's connection to the broker: one for an asyncio loop, one with a thread of its own."""

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
from protocol.messages import AnyMessage, Goodbye, Heartbeat, Hello, Refused, Welcome
from protocol.security.client import ClientKeys, HandshakeWatch
from protocol.session import Progress, Session
from protocol.sockets import AsyncSocket, dealer

log = logging.getLogger(__name__)

TICK_S = 0.1

Inbox = tuple[AnyMessage, list[bytes]] | Exception | None
OnMessage = Callable[[AnyMessage, list[bytes]], None]


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
        for message, rest in messages_in(frames, "the broker"):
            try:
                self._take(message, rest)
            except Exception:  # what else was said at once counts all the same
                log.exception("%s could not be handled", type(message).__name__)

    def _take(self, message: AnyMessage, rest: list[bytes]) -> None:
        if isinstance(message, Refused):
            self._refused = message.message
        if self.session.received(message, time.monotonic()):
            self._joined.set()
            self._on_join()
        elif not isinstance(message, Heartbeat | Welcome):  # answers to ours; the session has noted them
            self._on_message(message, rest)

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
        self._outbox: deque[tuple[Frames, int | None]] = deque()
        self._stop, self._again = threading.Event(), threading.Event()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind(self._wake_address)
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="broker link", daemon=True)
        self._thread.start()

    def send(self, message: AnyMessage, body: bytes | None = None, *, join: int | None = None) -> None:
        """Queue a message; may be called from any thread.

        Args:
            join: it answers what came after the so many-th None of the inbox, and is left out when we have to join
                again before it leaves: the broker would take it for a word of the next join.
        """
        self.send_frames(encode(message, body), join=join)

    def send_frames(self, frames: Frames, *, join: int | None = None) -> None:
        """The same of a message that is encoded already."""
        self._outbox.append((frames, join))
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
        leaving: deque[Sequence[Buffer]] = deque()
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
                self._take(message, rest)

    def _take(self, message: AnyMessage, rest: list[bytes]) -> None:
        if self.session.received(message, time.monotonic()):
            self.trouble = ""
            self.inbox.put(None)
        elif not isinstance(message, Heartbeat | Welcome):
            if isinstance(message, Refused) and message.fatal:
                self.trouble = message.message
            self.inbox.put((message, rest))


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
