"""A connection is known by its descriptor and its inode, so that it is never mistaken for a different one."""

import os
import socket

import pytest
import zmq

from protocol.security.guard import Connection


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def of(ours):
    return Connection(ours.fileno(), os.fstat(ours.fileno()).st_ino)


def test_an_open_connection_is_cut_once(pair):
    ours, theirs = pair
    connection = of(ours)
    assert connection.is_open
    assert connection.cut()
    assert theirs.recv(1) == b""
    assert connection.is_open, "it is for its owner to close"


def test_what_has_the_descriptor_afterwards_is_another_and_stays(pair):
    ours, _ = pair
    connection = of(ours)
    ours.close()
    assert not connection.is_open
    assert not connection.cut()
    others = []
    while connection.descriptor not in [end.fileno() for ends in others for end in ends]:
        others.append(socket.socketpair())
        assert len(others) < 100
    assert not connection.is_open
    assert not connection.cut()
    for one, other in others:
        one.send(b"x")
        assert other.recv(1) == b"x"
        one.close()
        other.close()


class Frame:
    def __init__(self, descriptor):
        self.descriptor = descriptor

    def get(self, option):
        assert option == zmq.SRCFD
        if self.descriptor is None:
            raise zmq.ZMQError
        return self.descriptor


def test_what_is_no_socket_is_no_connection(pair, tmp_path):
    with open(tmp_path / "file", "w") as file:
        assert Connection.of(Frame(file.fileno())) is None
    assert Connection.of(Frame(None)) is None
    assert Connection.of(Frame(1 << 20)) is None
    assert Connection.of(Frame(pair[0].fileno())) == of(pair[0])
