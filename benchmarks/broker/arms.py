"""The arms of `benchmarks.broker`: our broker, forwarders of plain ZeroMQ, and Redis Streams."""

import contextlib
import logging
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from benchmarks.broker.load import AGES, Load, run_actors, run_learner
from broker.config import BrokerConfig
from broker.service import serve
from launch.processes import free_port, free_ports
from protocol.security.key_files import make

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


_spawn = multiprocessing.get_context("spawn")


@dataclass
class Run:
    """A broker under load: its process id, the shared count of finished segments, the pipe for latencies."""

    pid: int
    done: Any
    results: Any = None
    ages: Any = None
    """Shared array of seconds: how long each of the last trajectories took from the actor to the learner."""


@dataclass(frozen=True)
class Arm:
    """A broker in one setting.

    ``journal`` is "" (no journal), "written" or "synced". ``segments`` is the number of segments per
    trajectory. ``other`` names what takes our broker's place: "loop", "proxy" or "redis", or "" for our
    broker.
    """

    name: str
    journal: str = ""
    encrypted: bool = False
    segments: int = 1
    other: str = ""


OURS = (
    Arm("ours, memory"),
    Arm("ours, journal written", "written"),
    Arm("ours, journal synced", "synced"),
    Arm("ours, CURVE, memory", encrypted=True),
    Arm("ours, CURVE, journal synced", "synced", encrypted=True),
)
LONG = (
    Arm("ours, memory, 8 segments a trajectory", segments=8),
    Arm("ours, CURVE, memory, 8 segments a trajectory", encrypted=True, segments=8),
    Arm("ours, journal synced, 8 segments a trajectory", "synced", segments=8),
)
LOOP = "pyzmq forwarder, Python loop"
OTHERS = (
    Arm(LOOP, other="loop"),
    Arm("zmq.proxy, C", other="proxy"),
    Arm("Redis Streams, memory", other="redis"),
    Arm("Redis Streams, AOF always", "synced", other="redis"),
)


def serve_ours(settings: dict[str, Any], journal: Path | None, keys: Path | None) -> None:
    """Run the broker's process."""
    logging.basicConfig(level=logging.WARNING)
    config = BrokerConfig.model_validate(settings)
    serve(config, run="benchmark", max_policy_lag=4, journal=journal, keys=keys)


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Any]]:
    """Yield a function that starts a process. Kill all started processes at the end."""
    started = []

    def start(target: Callable[..., None], *arguments: Any, **named: Any) -> Any:
        process = _spawn.Process(target=target, args=arguments, kwargs=named, daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(started):
            process.kill()
        for process in started:
            process.join()


@contextlib.contextmanager
def ours(arm: Arm, folder: Path, load: Load) -> Iterator[Run]:
    """Run our broker with actors and a learner."""
    port, http_port = free_ports(2)
    endpoint, http = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{http_port}"
    keys = folder / "keys" if arm.encrypted else None
    if keys is not None:
        make(keys)
    settings: dict[str, Any] = {"endpoint": endpoint, "http": http}
    if arm.journal:
        settings["journal"] = {"durability": arm.journal}
    load = replace(load, endpoint=endpoint, keys=keys)
    acked, committed = _spawn.RawValue("Q", 0), _spawn.RawValue("Q", 0)
    results, sender = _spawn.Pipe(duplex=False)
    ages = _spawn.RawArray("d", AGES)
    with processes() as start:
        journal = folder / "journal" if arm.journal else None
        broker = start(serve_ours, settings, journal, keys)
        start(run_actors, load, acked, sender)
        start(run_learner, load, committed, ages)
        yield Run(broker.pid, committed, results, ages)


@contextlib.contextmanager
def forwarder(arm: Arm, load: Load) -> Iterator[Run]:
    """Run sockets that only forward, with a producer and a consumer."""
    front, back = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    acked = _spawn.RawValue("Q", 0)
    with processes() as start:
        broker = start(forward, front, back, in_c=arm.other == "proxy")
        start(produce, front, load.nbytes, load.window, acked, load.connections)
        start(consume, back)
        yield Run(broker.pid, acked)


@contextlib.contextmanager
def redis_streams(arm: Arm, folder: Path, load: Load, server: str) -> Iterator[Run]:
    """Run Redis with a producer and a consumer."""
    port, acked = free_port(), _spawn.RawValue("Q", 0)
    with (
        redis_server(server, port, folder, persistent=arm.journal != "") as pid,
        processes() as start,
    ):
        start(redis_produce, port, load.nbytes, load.window, acked)
        start(redis_consume, port, load.window, acked)
        yield Run(pid, acked)


def running(arm: Arm, folder: Path, load: Load, server: str) -> contextlib.AbstractContextManager[Run]:
    if arm.other == "redis":
        return redis_streams(arm, folder, load, server)
    return forwarder(arm, load) if arm.other else ours(arm, folder, load)
