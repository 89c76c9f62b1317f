"""Peers that take the broker's place: sockets that only forward, and Redis Streams."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

HEADER = bytes(400)
"""Bytes that stand for a segment's header."""
WAIT_S = 10.0


# --- sockets ------------------------------------------------------------------------------------------------


def forward(front: str, back: str, *, in_c: bool) -> None:
    """Forward messages DEALER -> ROUTER -> DEALER and back without reading them, in a Python loop or in C."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    sockets = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, endpoint in zip(sockets, (front, back), strict=True):
        socket.bind(endpoint)
    if in_c:
        zmq.proxy(*sockets)
    other = dict(zip(sockets, reversed(sockets), strict=True))
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            with contextlib.suppress(zmq.Again):
                while True:
                    other[socket].send_multipart(socket.recv_multipart(zmq.DONTWAIT))


def produce(endpoint: str, nbytes: int, window: int, acked: Any, connections: int = 1) -> None:
    """Keep ``window`` messages under way, spread over ``connections`` connections."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    body, poller = bytes(nbytes), zmq.Poller()
    for _ in range(connections):
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        for _ in range(window // connections):
            socket.send_multipart([HEADER, body])
    while True:
        for socket, _ in poller.poll():
            with contextlib.suppress(zmq.Again):
                while True:
                    socket.recv(zmq.DONTWAIT)
                    socket.send_multipart([HEADER, body])
                    acked.value += 1


def consume(endpoint: str) -> None:
    """Acknowledge all messages."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    while True:
        socket.send_multipart([socket.recv_multipart()[0], b"ack"])


# --- Redis --------------------------------------------------------------------------------------------------


def why_no_redis(server: str) -> str:
    """Return what is missing for the Redis rows of the table, or ""."""
    if shutil.which(server) is None:
        return "redis-server is not installed"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the package redis is not installed (extra `bench`)"
    return ""


@contextlib.contextmanager
def redis_server(server: str, port: int, folder: Path, *, persistent: bool) -> Iterator[int]:
    """Run a Redis server for one run. Yield its process id."""
    import redis

    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "yes" if persistent else "no",
        "appendfsync": "always",
        "auto-aof-rewrite-percentage": "0",
    }
    command = [server, *(part for name, value in options.items() for part in (f"--{name}", value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    client = redis.Redis(port=port)
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                client.xgroup_create("segments", "learner", mkstream=True)
                break
            except redis.exceptions.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield process.pid
    finally:
        client.close()
        process.kill()
        process.wait()


def redis_produce(port: int, nbytes: int, window: int, acked: Any) -> None:
    """Add messages with XADD in batches. Wait while more than four windows are not consumed yet."""
    import redis

    client, body, sent = redis.Redis(port=port), bytes(nbytes), 0
    batch = max(1, window // 4)
    while True:
        if sent - acked.value > 4 * window:
            time.sleep(0.0005)
            continue
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(batch):
                pipeline.xadd("segments", {"header": HEADER, "body": body})
            pipeline.execute()
        sent += batch


def redis_consume(port: int, window: int, acked: Any) -> None:
    """Read messages with XREADGROUP, then acknowledge and delete them with XACK and XDEL."""
    import redis

    client = redis.Redis(port=port)
    batch = max(1, window // 4)
    while True:
        found: Any = client.xreadgroup("learner", "one", {"segments": ">"}, count=batch, block=100)
        for _, entries in found:
            ids = [entry_id for entry_id, _ in entries]
            with client.pipeline(transaction=False) as pipeline:
                pipeline.xack("segments", "learner", *ids)
                pipeline.xdel("segments", *ids)
                pipeline.execute()
            acked.value += len(ids)
