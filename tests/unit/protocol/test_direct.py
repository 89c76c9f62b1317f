"""Peers of one process: messages pass by calls of the loop, and a blocking role lets the loop run while it waits."""

import asyncio
import queue
import threading

import pytest

from protocol.codec import decode, encode
from protocol.direct import DirectConnection, DirectListener
from protocol.messages.peers import Goodbye, Hello, Welcome
from protocol.sockets import LoopLink

AT = "direct://test"
HELLO = Hello(role="learner", peer="learner", incarnation=1)
WELCOME = Welcome(run="r", epoch=1, heartbeat_s=1.0, policy_version=0)


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


class Broker:
    """Answers Hello with Welcome, and keeps what it is told."""

    def __init__(self):
        self.told = []
        self.listener = DirectListener(AT, self.received)

    def received(self, frames):
        message, _ = decode(frames[1:])
        self.told.append(message)
        if isinstance(message, Hello):
            welcome = Welcome(run="r", epoch=1, heartbeat_s=1.0, policy_version=0, attempt=message.attempt)
            self.listener.send([frames[0], *encode(welcome)])


@pytest.fixture
def broker():
    broker = Broker()
    yield broker
    broker.listener.close()


def test_messages_pass_both_ways_in_order_and_not_within_a_handler(loop, broker):
    heard, depth = [], []

    async def main():
        def on_frames(frames):
            depth.append(len(heard))
            heard.append(decode(frames)[0])

        connection = DirectConnection(AT, "p", on_frames)
        connection.send(encode(HELLO))
        connection.send(encode(Goodbye(reason="a")))
        # Nothing is handled before the sender has returned.
        assert not broker.told
        await asyncio.sleep(0.01)
        connection.close()
        broker.listener.send([b"p", *encode(WELCOME)])
        await asyncio.sleep(0.01)

    loop.run_until_complete(main())
    assert [type(message) for message in broker.told] == [Hello, Goodbye]
    assert heard == [WELCOME]


def test_an_address_has_one_listener_and_a_connection_needs_it(broker, loop):
    with pytest.raises(ValueError, match="is taken"):
        DirectListener(AT, print)

    async def main():
        DirectConnection("direct://nobody", "p", print)

    with pytest.raises(ValueError, match="nobody in this process listens"):
        loop.run_until_complete(main())


def test_a_blocking_role_joins_waits_and_sends_while_the_loop_runs(loop, broker):
    link = LoopLink(AT, HELLO, loop=loop)
    while not link.session.joined:
        link.wait(0.01)
    assert link.inbox.get(1.0) is None
    with pytest.raises(queue.Empty):
        link.inbox.get(0.01)
    # A thread of the learner announces versions.
    thread = threading.Thread(target=link.send, args=(Goodbye(reason="from a thread"),))
    thread.start()
    thread.join()
    link.wait(0.01)
    assert broker.told[-1] == Goodbye(reason="from a thread")
    # What belongs to an earlier join is left out.
    link.send(Goodbye(reason="late"), join=link.session.joins - 1)
    link.wait(0.01)
    assert broker.told[-1] == Goodbye(reason="from a thread")
    link.rejoin()
    link.wait(0.3)
    assert link.inbox.get(1.0) is None
    link.close("done")
    loop.run_until_complete(asyncio.sleep(0.01))
    assert broker.told[-1] == Goodbye(reason="done")
