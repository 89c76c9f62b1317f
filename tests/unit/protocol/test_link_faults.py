"""The owner of a connection sees what breaks in its background. Stand-ins replace the sockets."""

import asyncio
import logging
import queue
import time
from types import SimpleNamespace

import pytest
import zmq

from protocol import sockets
from protocol import sockets as link
from protocol.codec import encode
from protocol.errors import LinkDown
from protocol.messages.episodes import TaskCredit
from protocol.messages.peers import Drain, Hello, Welcome
from protocol.session import Progress
from protocol.sockets import UNSENT_LIMIT, AsyncLink, AsyncSocket, ThreadLink
from tests.hearing import heard

HELLO = Hello(role="actor", peer="a", incarnation=1)
FAULT = ZeroDivisionError("in progress")
WELCOME = Welcome(run="r", epoch=0, heartbeat_s=0.5, policy_version=0)


class Received:
    """A socket with messages to read, which sends none."""

    type = zmq.DEALER

    def __init__(self, *messages):
        self.messages = [[message] for message in messages]

    def connect(self, endpoint):
        pass

    def bind(self, endpoint):
        pass

    def fileno(self):
        return 0

    def recv_multipart(self, flags):
        if not self.messages:
            raise zmq.Again
        return self.messages.pop(0)

    def send_multipart(self, frames, flags):
        pass

    def send(self, frame, flags):
        pass

    def close(self):
        pass


class NothingToSee:
    """A stand-in for the watch over handshakes."""

    why = ""

    def __init__(self, *_):
        pass

    def look(self, now):
        return ""

    def reconnected(self):
        return False

    def close(self):
        pass


@pytest.fixture(autouse=True)
def no_descriptors(monkeypatch):
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", lambda *_: None)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "remove_reader", lambda *_: None)
    monkeypatch.setattr(link, "dealer", lambda *_: Received())
    monkeypatch.setattr(link, "HandshakeWatch", NothingToSee)


def failing():
    raise FAULT


def test_a_message_that_cannot_be_handled_does_not_leave_the_next_unread(caplog):
    seen = []

    def handle(frames):
        seen.append(frames[0])
        if frames[0] == b"bad":
            raise KeyError("fault")

    async def main():
        socket = AsyncSocket(Received(b"bad", b"good"), handle)
        await asyncio.sleep(0)
        socket.close()

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())
    assert seen == [b"bad", b"good"]


def test_whatever_is_said_in_one_turn_is_sent_and_the_limit_is_for_what_nobody_takes(monkeypatch):
    monkeypatch.setattr(sockets, "OUTBOX_LIMIT", 8)
    sent, refusing = [], [False]

    class Sending(Received):
        def send_multipart(self, frames, flags):
            if refusing[0]:
                raise zmq.Again
            sent.append(frames)

    def say_much(socket):
        for n in range(3 * UNSENT_LIMIT):
            socket.send(encode(TaskCredit(tasks=n)))

    async def main():
        socket = AsyncSocket(Sending(), lambda _: None)
        say_much(socket)
        socket.close()
        refusing[0] = True
        blocked = AsyncSocket(Sending(), lambda _: None)
        with pytest.raises(LinkDown, match="8 messages wait"):
            say_much(blocked)
        blocked.close()

    asyncio.run(main())
    assert [m.tasks for frames in sent for m in heard(frames)[0]] == [*range(3 * UNSENT_LIMIT)]


def test_messages_that_take_long_do_not_keep_the_loop_from_others(monkeypatch):
    clock, seen = [0.0], []
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def handle(frames):
        seen.append(frames[0])
        clock[0] += sockets.PUMP_S

    async def main():
        socket = AsyncSocket(Received(*range(9)), handle)
        await asyncio.sleep(0)
        first = len(seen)
        for _ in range(9):
            await asyncio.sleep(0)
        socket.close()
        return first

    assert asyncio.run(main()) <= 2
    assert seen == [*range(9)]


def test_a_link_whose_heartbeats_fail_tells_its_owner(caplog):
    reasons = []

    async def main():
        broken = AsyncLink(
            "tcp://broker", HELLO, lambda *_: None, progress=failing, on_failure=reasons.append
        )
        broken.session.received(WELCOME, time.monotonic())
        with pytest.raises(LinkDown, match="tcp://broker has ended: ZeroDivisionError"):
            await broken.joined(60.0)
        await broken.close()

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())
    assert len(reasons) == 1


def test_a_link_thread_that_fails_leaves_its_exception_in_the_inbox(monkeypatch, caplog):
    class Context:
        def socket(self, kind):
            return Received()

    class Poller:
        def register(self, socket, events):
            pass

        def poll(self, milliseconds):
            return []

    monkeypatch.setattr(zmq.Context, "instance", Context)
    monkeypatch.setattr(zmq, "Poller", Poller)
    with caplog.at_level(logging.CRITICAL + 1):
        broken = ThreadLink("tcp://broker", HELLO, progress=failing)
        broken.session.received(WELCOME, time.monotonic())
        assert broken.inbox.get(timeout=60.0) is FAULT
        broken.close()
    with pytest.raises(queue.Empty):
        broken.inbox.get_nowait()


def test_the_answer_to_a_hello_that_was_repeated_since_is_not_for_the_owner():
    got = []
    welcome = Welcome(run="r", epoch=0, heartbeat_s=1.0, policy_version=0)

    async def main():
        slow = AsyncLink("tcp://broker", HELLO, lambda message, _: got.append(message))
        for seconds in (0.0, 10.0, 20.0):
            slow.session.due(time.monotonic() + seconds, Progress)
        slow._received(encode(welcome))
        assert not slow.session.joined
        slow._received(encode(Drain(reason="for the owner")))
        await slow.close()

    asyncio.run(main())
    assert got == [Drain(reason="for the owner")]
