"""A reset or garbled connection to a live broker loses the messages in transit.

The peer joins again and is not left without a connection.
"""

import asyncio
import socket
import threading
import time

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import sockets
from protocol.codec import encode, messages_in
from protocol.messages.episodes import DeliveryCredit
from protocol.messages.peers import Heartbeat, Hello, Welcome
from protocol.sockets import AsyncLink, ThreadLink, dealer, router
from tests.campaigns.faults.scene import Proxy

HELLO = Hello(role="actor", peer="a", incarnation=1)
DEADLINE_S = 120.0


class Answering:
    """A broker that knows everybody and is never silent."""

    def __init__(self):
        self.hellos, self.credit = 0, []
        self._context = zmq.Context()
        self._socket = router(self._context)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self):
        while not self._over.is_set():
            if not self._socket.poll(50):
                continue
            peer, *frames = self._socket.recv_multipart()
            for message, _ in messages_in(frames, "the link"):
                answer = Heartbeat()
                if isinstance(message, DeliveryCredit):
                    self.credit.append(message.units)
                if isinstance(message, Hello):
                    self.hellos += 1
                    answer = Welcome(
                        run="r", epoch=0, heartbeat_s=0.2, policy_version=0, attempt=message.attempt
                    )
                self._socket.send_multipart([peer, *encode(answer)])

    def close(self):
        self._over.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def broker():
    broker = Answering()
    yield broker
    broker.close()


@pytest.fixture
def proxy(broker):
    proxy = Proxy(("127.0.0.1", broker.port))
    yield proxy
    proxy.close()


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_thread_that_is_cut_off_joins_again(broker, proxy):
    link = ThreadLink(proxy.endpoint, HELLO)
    until(lambda: link.session.joins == 1)
    time.sleep(1.0)
    assert link.session.joins == 1, "the first connection is no other one"
    proxy.cut()
    until(lambda: link.session.joins == 2)
    link.close()


def test_what_is_of_a_join_is_not_said_in_the_next(broker, proxy):
    link = ThreadLink(proxy.endpoint, HELLO)
    until(lambda: link.session.joins == 1)
    link.send(DeliveryCredit(units=1), join=1)
    until(lambda: broker.credit == [1])
    link.rejoin()
    until(lambda: link.session.joins == 2)
    link.send(DeliveryCredit(units=2), join=1)
    # This join number is from before the first join.
    link.send(DeliveryCredit(units=2), join=0)
    link.send(DeliveryCredit(units=3), join=2)
    link.send(DeliveryCredit(units=4))
    until(lambda: 4 in broker.credit)
    assert broker.credit == [1, 3, 4]
    link.close()


def test_a_loop_that_is_cut_off_joins_again(broker, proxy):
    async def main():
        joined = asyncio.Event()
        link = AsyncLink(proxy.endpoint, HELLO, lambda *_: None, on_join=joined.set)
        await asyncio.wait_for(joined.wait(), DEADLINE_S)
        joined.clear()
        await asyncio.sleep(1.0)
        assert not joined.is_set(), "the first connection is no other one"
        proxy.cut()
        await asyncio.wait_for(joined.wait(), DEADLINE_S)
        await link.close()

    asyncio.run(main())


class Garbage:
    """A filter that turns the first data it gets into garbage, and passes all later data."""

    def __init__(self):
        self.count = 0

    def __call__(self, data):
        self.count += 1
        return data if self.count > 1 else b"\xff" * len(data)


@pytest.mark.parametrize("only_back", [True, False])
def test_a_peer_that_is_sent_nonsense_connects_again(broker, proxy, only_back):
    link = ThreadLink(proxy.endpoint, HELLO)
    until(lambda: link.session.joins == 1)
    proxy.only_back, proxy.mangle = only_back, Garbage()
    until(lambda: link.session.joins > 1)
    assert proxy.connections == 2
    link.close()


def test_a_peer_whose_connection_nobody_answers_tries_again_soon(monkeypatch):
    """The kernel's own tries come at ever longer intervals, so a line that is back would stay unused."""
    monkeypatch.setattr(sockets, "CONNECT_MS", 300)
    context = zmq.Context()
    # A server whose queue is full answers nobody, as a line that passes nothing.
    deaf = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    peer = dealer(context, "a")
    events = peer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
    try:
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(deaf.getsockname())
        peer.connect(f"tcp://127.0.0.1:{deaf.getsockname()[1]}")
        # Otherwise the kernel would try for two minutes before the first of them.
        for _ in range(3):
            assert events.poll(20_000)
            recv_monitor_message(events)
    finally:
        peer.disable_monitor()
        for each in (events, peer):
            each.close(0)
        for each in (deaf, *waiting):
            each.close()
        context.term()
