"""Send junk, floods and bombs to the broker's port, as strangers and as peers.

OFFBEAT_JUNK=10000 runs with the numbers of docs/run/security.md.
"""

import contextlib
import os
import random
import socket
import sys
import time

import msgspec
import pytest
import zmq

from protocol.codec import MAX_BODY_BYTES, PRELUDE, encode
from protocol.messages.peers import Heartbeat, Hello, Refused, Welcome
from protocol.security import key_files
from protocol.security.client import ClientKeys
from tests.integration.protocol.encrypted_harness import Broker, Peer, until

JUNK = int(os.environ.get("OFFBEAT_JUNK", "200"))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
CURVE_GREETING = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL_GREETING = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
GROWTH_MB = 24.0
"""Upper limit of the memory growth in MB, whatever the number of connections."""


@pytest.fixture
def keys(tmp_path):
    key_files.make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def broker(tmp_path, keys):
    running = Broker(keys, tmp_path / "broker.log", heartbeat_s=2.0)
    yield running
    running.stop()


def junk(rng):
    """Return bytes that a stranger may send, of one of several kinds."""
    kinds = [
        lambda: b"",
        lambda: rng.randbytes(rng.randrange(1, 4_096)),
        lambda: b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: GREETING[: rng.randrange(1, len(GREETING))],
        lambda: NULL_GREETING + READY + b"\x01\x00\x00\x05hello",
        lambda: CURVE_GREETING + b"\x04\xc8\x05HELLO" + rng.randbytes(194),
        lambda: CURVE_GREETING + b"\x06" + b"\xff" * 8,
    ]
    return rng.choice(kinds)()


def flood(endpoint, count, each=lambda: None):
    """Open ``count`` connections that send junk; some are held open for a while."""
    rng, held = random.Random(7), []
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for number in range(count):
        stranger = socket.create_connection((host, int(port)), timeout=60.0)
        # The broker may have cut this connection already.
        with contextlib.suppress(OSError):
            stranger.sendall(junk(rng))
        held.append(stranger)
        if len(held) > 200:
            held.pop(rng.randrange(len(held))).close()
        if number % 50 == 0:
            each()
    for stranger in held:
        stranger.close()


def test_junk_harms_nobody(broker, keys):
    context = zmq.Context()
    worker = Peer(context, broker, keys, "actor", "actor-0")
    worker.join()
    before, waits = broker.resident_mb(), []

    def beat():
        started = time.monotonic()
        worker.say(Heartbeat())
        worker.hear(Heartbeat)
        waits.append(time.monotonic() - started)

    started = time.monotonic()
    flood(broker.endpoint, JUNK, beat)
    seconds = time.monotonic() - started
    beat()
    grown = broker.resident_mb() - before
    waits.sort()
    sys.stdout.write(
        f"{JUNK} junk connections in {seconds:.1f} s: RSS {before:.1f} MB, +{grown:.1f} MB; round trip of a peer "
        f"meanwhile median {waits[len(waits) // 2] * 1e3:.1f} ms, longest {waits[-1] * 1e3:.0f} ms\n"
    )
    worker.socket.close(linger=0)
    context.term()
    assert waits[-1] < 5.0
    assert grown < GROWTH_MB
    assert broker.peers() == {"actor-0"}
    assert broker.refused() == {}
    assert "handshakes_refused" in broker.status()["security"]


def test_strangers_with_keys_of_their_own_are_held_off(broker, keys, tmp_path):
    strange = tmp_path / "strange"
    key_files.make(strange)
    (strange / "broker.pub").write_bytes((keys / "broker.pub").read_bytes())
    own = ClientKeys.read(strange, "actor", "actor-0", "broker")
    context = zmq.Context()
    before = broker.resident_mb()
    for _ in range(JUNK // 50):
        sockets = []
        for _ in range(50):
            sockets.append(context.socket(zmq.DEALER))
            own.apply(sockets[-1])
            sockets[-1].connect(broker.endpoint)
            sockets[-1].send_multipart(encode(Hello(role="actor", peer="actor-0", incarnation=1)))
        time.sleep(0.3)
        for each in sockets:
            each.close(linger=0)
    context.term()
    until(
        lambda: sum(broker.status()["security"]["handshakes_refused"].values()) >= JUNK // 4,
        "refusals are counted",
    )
    assert broker.peers() == set()
    assert broker.resident_mb() - before < GROWTH_MB


def nested(depth):
    """Return a header whose free-form field holds lists in lists."""
    return b"\x83\xa4type\xa8put_task\xa5tasks" + b"\x91" * depth + b"\xc0"


def bombs():
    """Return frames with which an admitted peer may try to break the broker, and the codes of the answers."""
    task = {"task_id": "t", "env": "e", "group_id": "g", "group_size": 1}
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    packed = msgspec.msgpack.encode({"type": "put_tasks", "tasks": [task | {"data": {"deep": deep}}]})
    deeper = packed.replace(b"\x91" * 900, b"\x91" * 100_000)
    assert len(deeper) > 100_000
    huge_map = b"\xdf\xff\xff\xff\xff"
    return {
        "deep": ([PRELUDE, deeper], "malformed"),
        "nested": ([PRELUDE, nested(200_000)], "malformed"),
        "map of 4 G entries": ([PRELUDE, huge_map], "malformed"),
        "list of 4 G tasks": (
            [PRELUDE, b"\x82\xa4type\xa9put_tasks\xa5tasks\xdd\xff\xff\xff\xff"],
            "malformed",
        ),
        "string of 4 GB": ([PRELUDE, b"\x81\xa4type\xdb\xff\xff\xff\xff"], "malformed"),
        "header too long": ([PRELUDE, bytes(300_000)], "limit"),
        "too many frames": ([PRELUDE, b"x", *[b""] * 70_000], "limit"),
        "no frames": ([b""], "malformed"),
    }


@pytest.mark.parametrize("kind", bombs())
def test_a_bomb_of_an_admitted_peer_is_refused(broker, keys, kind):
    frames, code = bombs()[kind]
    context = zmq.Context()
    peer = Peer(context, broker, keys, "actor", "actor-0")
    peer.join()
    before = broker.resident_mb()
    for _ in range(5):
        peer.socket.send_multipart(frames)
        assert peer.hear(Refused).code == code
    peer.say(Heartbeat())
    peer.hear(Heartbeat)
    assert broker.resident_mb() - before < GROWTH_MB
    peer.socket.close(linger=0)
    context.term()


def test_a_frame_that_is_too_large_costs_its_sender_the_connection_and_nobody_else(broker, keys):
    context = zmq.Context()
    peers = [Peer(context, broker, keys, "actor", f"actor-{i}") for i in range(2)]
    for peer in peers:
        peer.join()
    before = broker.resident_mb()
    peers[0].socket.send_multipart([PRELUDE, b"x", bytes(MAX_BODY_BYTES + 2_000)])
    peers[0].say(Heartbeat())
    peers[1].say(Heartbeat())
    peers[1].hear(Heartbeat)
    assert broker.resident_mb() - before < GROWTH_MB
    peers[0].say(peers[0].hello)
    peers[0].hear(Welcome)
    for peer in peers:
        peer.socket.close(linger=0)
    context.term()
