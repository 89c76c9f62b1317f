"""Test the wire that a fault campaign tampers with, against an echo server on loopback."""

import random
import socket
import threading
import time

import pytest

from tests.campaigns.faults.scene import Flips, Proxy, Swaps


@pytest.fixture
def proxy():
    """Yield a proxy in front of an echo server."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                one, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(one,), daemon=True).start()

    def echo(one):
        with one:
            while data := one.recv(65_536):
                one.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    proxy = Proxy(server.getsockname())
    yield proxy
    proxy.close()
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def client(proxy):
    host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as client:
        yield client


def ask(client, data):
    client.sendall(data)
    got = b""
    while len(got) < len(data):
        piece = client.recv(65_536)
        if not piece:
            break
        got += piece
    return got


def test_bytes_pass_and_are_recorded(proxy, client):
    assert ask(client, b"hello") == b"hello"
    assert ask(client, b"again") == b"again"
    assert (proxy.recorded, proxy.connections) == (b"helloagain", 1)


def test_each_flip_changes_one_bit(proxy, client):
    ask(client, b"x")
    proxy.mangle = flips = Flips(random.Random(1), share=1.0)
    got = ask(client, bytes(100))
    assert sum(byte.bit_count() for byte in got) == flips.count == 2  # one there, one back


def test_swapped_halves_have_all_bytes(proxy, client):
    ask(client, b"x")
    proxy.mangle = swaps = Swaps(random.Random(1), share=0.5)
    sent = bytes(range(100))
    seen = [ask(client, sent) for _ in range(20)]
    assert all(sorted(got) == list(sent) for got in seen)
    assert swaps.count > 0
    assert any(got != sent for got in seen)


def test_a_cut_ends_the_connection_and_the_next_is_let_in(proxy, client):
    ask(client, b"x")
    proxy.cut()
    assert client.recv(10) == b""
    host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as other:
        assert ask(other, b"y") == b"y"
    assert proxy.connections == 2


def test_a_delay_holds_up_every_read(proxy, client):
    ask(client, b"x")
    proxy.delay_s = 0.1
    began = time.monotonic()
    assert ask(client, b"y") == b"y"
    assert time.monotonic() - began >= 0.2


def test_without_a_server_behind_it_a_client_is_let_go(proxy):
    closed = Proxy(("127.0.0.1", 1))
    host, _, port = closed.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as client:
        assert client.recv(1) == b""
    closed.close()
