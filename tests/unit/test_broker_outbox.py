"""What the broker says to a peer in one turn of its loop leaves as one message, in order. No sockets."""

import pytest

from broker.books import Send
from broker.outbox import Outbox
from protocol.codec import MAX_JOINED
from protocol.errors import LinkDown
from protocol.messages import Deliver, Drain, PutTasks, Task, TaskCredit
from tests.hearing import heard

routes = {"a": b"a", "b": b"b"}


class Socket:
    """In place of the real one."""

    def __init__(self):
        self.sent, self.down = [], False

    def send(self, frames):
        if self.down:
            raise LinkDown("full")
        messages, rest = heard(frames[1:])
        self.sent.append((frames[0], messages, len(rest)))


@pytest.fixture
def socket():
    return Socket()


@pytest.fixture
def failed():
    return []


@pytest.fixture
def outbox(socket, failed):
    return Outbox(socket.send, routes.get, lambda peer, message, error: failed.append((peer, message)))


def credits(*numbers, to="a"):
    return [Send(to, TaskCredit(tasks=n)) for n in numbers]


def test_one_message_a_peer_with_all_that_was_said(outbox, socket, failed):
    outbox.say(credits(1, 2))
    outbox.say(credits(3, to="b") + credits(4))
    assert socket.sent == []
    outbox.post()
    said = [(route, [m.tasks for m in messages]) for route, messages, _ in socket.sent]
    assert said == [(b"a", [1, 2, 4]), (b"b", [3])]
    outbox.post()
    assert len(socket.sent) == 2


def test_a_delivery_comes_in_its_place(outbox, socket, failed):
    outbox.say([*credits(1), Send("a", Deliver(unit_id="u", segments=1), [(b"\x80", b"")]), *credits(2)])
    outbox.post()
    sent = [([type(m).__name__ for m in messages], rest) for _, messages, rest in socket.sent]
    assert sent == [(["TaskCredit"], 0), (["Deliver"], 2), (["TaskCredit"], 0)]


def test_no_more_than_the_peer_takes_in_one(outbox, socket, failed):
    outbox.say(credits(*range(1, MAX_JOINED + 2)))
    outbox.post()
    assert [len(messages) for _, messages, _ in socket.sent] == [MAX_JOINED, 1]
    assert [m.tasks for _, messages, _ in socket.sent for m in messages] == [*range(1, MAX_JOINED + 2)]


def large(tasks=1, text=200_000):
    return PutTasks(
        tasks=[Task(task_id="a", env="e", data={"text": "x" * text}, group_id="g", group_size=1)] * tasks
    )


def test_what_is_too_large_together_goes_one_by_one(outbox, socket, failed):
    outbox.say([Send("a", large()), Send("a", large()), *credits(1)])
    outbox.post()
    assert [len(messages) for _, messages, _ in socket.sent] == [1, 1, 1]


def test_what_no_header_holds_is_counted_and_the_rest_sent(outbox, socket, failed):
    outbox.say([Send("a", large(tasks=2)), *credits(1)])
    outbox.post()
    assert [messages for _, messages, _ in socket.sent] == [[TaskCredit(tasks=1)]]
    assert len(failed) == 1


def test_a_socket_that_takes_no_more_is_counted(outbox, socket, failed):
    socket.down = True
    outbox.say([Send("a", Drain())])
    outbox.post()
    assert len(failed) == 1


def test_who_was_never_here_is_sent_nothing(outbox, socket, failed):
    outbox.say([*credits(1, to="c"), Send("c", Deliver(unit_id="u", segments=0), []), *credits(2)])
    outbox.post()
    assert [route for route, _, _ in socket.sent] == [b"a"]
    assert failed == []
