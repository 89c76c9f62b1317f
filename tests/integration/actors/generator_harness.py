"""A generator process under test, the broker it joins, and an actor that asks it for tokens."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from msgspec.structs import replace

from actors.config import GeneratorConfig
from actors.generator.generator import serve_generator
from actors.sampled import routes_in
from protocol.codec import AnyMessage, encode, encode_arrays, messages_in, unpack_arrays
from protocol.messages.peers import (
    Abort,
    Chunk,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    WeightsReady,
    Welcome,
)
from protocol.sockets import dealer, router

RUN = "test"
DEADLINE_S = 400.0
"""Longest wait of a test. It is far above what a wait takes on a busy machine, since a wait ends by its event."""


class BrokerStub:
    """A broker that welcomes the generator, keeps what it sends, and announces versions to it."""

    def __init__(self, *, policy_version: int = 0, heartbeat_s: float = 0.2) -> None:
        self._socket = router(zmq.Context.instance())
        self._socket.bind("tcp://127.0.0.1:0")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._welcome = Welcome(run=RUN, epoch=0, heartbeat_s=heartbeat_s, policy_version=policy_version)
        self.hello: Hello | None = None
        self.beat = Heartbeat()
        self.beats = 0
        self.told: list[dict[str, float]] = []
        """Gauges of all heartbeats, in order."""
        self.goodbye: Goodbye | None = None
        self._peer = b""

    def poll(self) -> None:
        while self._socket.poll(10):
            peer, *frames = self._socket.recv_multipart()
            for message, _ in messages_in(frames, "the generator"):
                self._take(peer, message)

    def _take(self, peer: bytes, message: AnyMessage) -> None:
        match message:
            case Hello() as hello:
                self.hello, self._peer = hello, peer
                self.send(replace(self._welcome, attempt=hello.attempt))
            case Heartbeat() as beat:
                self.beat = beat
                self.told.append(dict(beat.gauges))
                self.beats += 1
            case Goodbye() as goodbye:
                self.goodbye = goodbye

    def send(self, message: Any) -> None:
        self._socket.send_multipart([self._peer, *encode(message)])

    def announce(self, manifest: Path, *, version: int, epoch: int = 0) -> None:
        self.send(WeightsReady(epoch=epoch, version=version, manifest=str(manifest)))

    def close(self) -> None:
        self._socket.close(linger=0)


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    chunks: int = 0
    finish_reason: str = ""
    error: str = ""
    kv: str = ""
    routes: dict[int, list[int]] = field(default_factory=dict)
    """Experts by position in the prompt and the answer."""


class ActorStub:
    """An actor that sends requests to one generator."""

    def __init__(self, endpoint: str, name: str = "actor-0") -> None:
        self._socket = dealer(zmq.Context.instance(), name)
        self._socket.connect(endpoint)
        self.answers: dict[str, Answer] = {}
        self.told_to_leave = False

    def ask(self, request_id: str, prompt: list[int], **settings: Any) -> None:
        settings.setdefault("max_tokens", 16)
        message = Generate(request_id=request_id, **settings)
        self.answers[request_id] = Answer()
        self._socket.send_multipart(encode_arrays(message, {"token_ids": np.array(prompt, dtype="<i4")}))

    def abort(self, request_id: str) -> None:
        self._socket.send_multipart(encode(Abort(request_id=request_id)))

    def poll(self) -> None:
        while self._socket.poll(10):
            for chunk, rest in messages_in(self._socket.recv_multipart(), "the generator"):
                if isinstance(chunk, Drain):
                    self.told_to_leave = True
                    continue
                assert isinstance(chunk, Chunk)
                self._take(chunk, rest)

    def _take(self, chunk: Chunk, rest: list[bytes]) -> None:
        arrays = unpack_arrays(chunk.arrays, rest[0])
        answer = self.answers[chunk.request_id]
        answer.ids += arrays["token_ids"].tolist()
        answer.logps += arrays["logp_behaviour"].tolist()
        answer.versions += arrays["policy_version"].tolist()
        rows = routes_in(arrays)
        for token, experts in zip(rows.tokens.tolist(), rows.experts.tolist(), strict=True) if rows else ():
            assert token not in answer.routes, "a row came twice"
            answer.routes[token] = experts
        answer.chunks += 1
        answer.finish_reason, answer.error, answer.kv = chunk.finish_reason, chunk.error, chunk.kv

    def close(self) -> None:
        self._socket.close(linger=0)


class Running:
    """A generator in its own process."""

    def __init__(self, config: GeneratorConfig, model: Path, **broker: Any) -> None:
        self.broker = BrokerStub(**broker)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(
            target=serve_generator,
            args=(config,),
            kwargs={"name": "generator-0", "broker": self.broker.endpoint, "model": str(model)}
            | {"run": RUN, "seed": 0},
        )
        self.process.start()
        self._actors: list[ActorStub] = []
        self.until(lambda: self.broker.hello is not None)

    def actor(self, name: str = "actor-0") -> ActorStub:
        assert self.broker.hello is not None
        self._actors.append(ActorStub(self.broker.hello.endpoint, name))
        return self._actors[-1]

    def until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Serve the sockets until the condition holds. It fails at once if the generator has died."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            assert self.process.is_alive() or self.process.exitcode == 0, "the generator has died"
            self.poll()

    def poll(self) -> None:
        self.broker.poll()
        for actor in self._actors:
            actor.poll()

    def ask(self, actor: ActorStub, request_id: str, prompt: list[int], **settings: Any) -> Answer:
        """Send one request and return its whole answer."""
        actor.ask(request_id, prompt, **settings)
        self.until(lambda: actor.answers[request_id].finish_reason != "")
        return actor.answers[request_id]

    def update(self, manifest: Path, *, version: int, epoch: int = 0) -> None:
        """Announce a version and wait until it is in service."""
        self.broker.announce(manifest, version=version, epoch=epoch)
        self.until(lambda: self.broker.beat.policy_version == version)

    def close(self) -> None:
        for actor in self._actors:
            actor.close()
        self.broker.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(120.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_process(pid: int) -> int:
    """Return the child that holds the engine: the only one that is not a resource tracker of Python."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(pid)}
    (engine,) = [child for child, command in commands.items() if b"resource_tracker" not in command]
    return engine


def gone(pid: int) -> bool:
    """Return whether a process is dead or waits to be reaped (init reaps it in its own time)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
