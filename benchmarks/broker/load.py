"""Light peers that load a broker: one process of actors and one of a learner, which only speak the protocol.

The arrays are made once, so only the header of a segment is encoded. Trajectories of one segment cost the
broker most: each segment then comes with a lease, a task's credit and a share of a commit.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from protocol.codec import PRELUDE, AnyMessage, Buffer, enclose, encode, open_envelope, pack_arrays
from protocol.messages.episodes import (
    Checkpointed,
    Commit,
    Deliver,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    Reward,
    Sampling,
    Segment,
    SegmentAck,
    SegmentCredit,
    Task,
    TaskCredit,
    Turn,
)
from protocol.messages.fields import ArraySpec
from protocol.messages.peers import Heartbeat, Hello, Welcome
from protocol.security.client import ClientKeys
from protocol.sockets import dealer

BYTES_PER_TOKEN = 13
GROUP = 4
BEAT_S = 1.0
DELIVERIES = 16
CHECKPOINT_EVERY = 16
POLL_MS = 100
TASKS_PER_MESSAGE = 1_024
AGES = 4_096
"""Number of ages that are kept, the last ones."""

_decode = msgspec.msgpack.Decoder(AnyMessage).decode
_decode_segment = msgspec.msgpack.Decoder(Segment).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Load:
    """The load on a broker at ``endpoint``.

    At most ``window`` trajectories of ``segments`` segments each are under way between actors and broker, and
    ``outstanding`` tasks in all. With ``rate`` the actors send that many segments per second. Without it they
    send as many as the broker takes.
    """

    endpoint: str
    nbytes: int
    actors: int
    window: int
    outstanding: int
    segments: int = 1
    keys: Path | None = None
    connections: int = 1
    """Connections of the producer in front of a forwarder. With our broker each actor has one connection."""
    rate: float = 0.0
    samples: int = 0


class Peer:
    """One connection to the broker, with heartbeats.

    Messages that are sent between two calls of `leave` go out together, as in all roles.
    """

    def __init__(self, load: Load, hello: Hello) -> None:
        keys = None if load.keys is None else ClientKeys.read(load.keys, hello.role, hello.peer, "broker")
        self.socket = dealer(zmq.Context.instance(), hello.peer, keys)
        self.socket.connect(load.endpoint)
        self._said: list[Sequence[Buffer]] = []
        self.send(hello)
        self.leave()
        self._beat_at = time.monotonic() + BEAT_S
        self._beats = 0

    def send(self, message: AnyMessage) -> None:
        self.send_frames(encode(message))

    def send_frames(self, frames: Sequence[Buffer]) -> None:
        self._said.append(frames)

    def leave(self) -> None:
        """Put the messages that were sent since the last call on the socket."""
        if self._said:
            said, self._said = self._said, []
            for frames in enclose(said):
                self.socket.send_multipart(frames)

    def beat(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._beats += 1
            self.send(Heartbeat(progress=float(self._beats), busy=True))

    def received(self) -> list[tuple[Any, list[bytes]]]:
        """Return the messages that have arrived, each with the frames after its header."""
        found: list[tuple[Any, list[bytes]]] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return found
            for one in open_envelope(frames):
                found.append((_decode(one[1]), list(one[2:])))  # type: ignore[arg-type]


def make_body(nbytes: int) -> tuple[int, list[ArraySpec], bytes]:
    """Return the number of tokens, the array specs and the body of a segment of about ``nbytes`` bytes."""
    n = max(4, nbytes // BYTES_PER_TOKEN)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "token_ids": np.arange(n, dtype="<i4"),
        "action_mask": np.ones(n, "u1"),
        "logp_behaviour": np.full(n, -0.5, "<f4"),
        "policy_version": np.zeros(n, "<i4"),
    }
    return n, *pack_arrays(arrays)


class Actors:
    """Several actors in one process. They answer a lease at once with the segments of its trajectory.

    The credit for the next task leaves together with the last segment, as with a real actor.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self.tokens, self._specs, self._body = make_body(load.nbytes)
        self._poller = zmq.Poller()
        self._ready: deque[tuple[Peer, LeaseTask, int]] = deque()
        """Segments to send: peer, lease, and index of the segment."""
        self._sent_at: dict[str, float] = {}
        self.latencies: list[float] = []
        self._peers: dict[Any, Peer] = {}
        for i in range(load.actors):
            peer = Peer(load, Hello(role="actor", peer=f"actor-{i}", incarnation=1))
            self._peers[peer.socket] = peer
            self._poller.register(peer.socket, zmq.POLLIN)
        self._credit = dict.fromkeys(self._peers, 0)

    def run(self, acked: Any, results: Connection) -> None:
        """Run until killed, or until there are ``load.samples`` latencies. Then send them to ``results``."""
        load, due = self._load, time.monotonic()
        while not load.samples or len(self.latencies) < load.samples:
            now = time.monotonic()
            for socket, _ in self._poller.poll(1 if load.rate else POLL_MS):
                acked.value += self._handle(self._peers[socket])
            for peer in self._peers.values():
                peer.beat(now)
            while self._ready and (not load.rate or time.monotonic() >= due) and self._answer():
                due = max(due + 1 / load.rate, now - 0.05) if load.rate else 0.0
            for peer in self._peers.values():
                peer.leave()
        results.send(self.latencies)

    def _handle(self, peer: Peer) -> int:
        acks = 0
        for message, _ in peer.received():
            match message:
                case SegmentAck():
                    assert message.status == "stored", message
                    acks += 1
                    if self._load.samples:
                        waited = time.perf_counter() - self._sent_at.pop(message.trajectory_id)
                        self.latencies.append(waited)
                case LeaseTask():
                    self._ready.extend((peer, message, index) for index in range(self._load.segments))
                case SegmentCredit():
                    self._credit[peer.socket] += message.segments
                case Welcome():
                    peer.send(TaskCredit(tasks=max(1, self._load.window // self._load.actors)))
        return acks

    def _answer(self) -> bool:
        """Send the next segment. Return False if there is no credit for it."""
        peer, lease, index = self._ready[0]
        if self._credit[peer.socket] <= 0:
            return False
        self._ready.popleft()
        self._credit[peer.socket] -= 1
        task, start, last = lease.task, index * self.tokens, index == self._load.segments - 1
        segment = Segment(
            trajectory_id=lease.trajectory_id,
            task_id=task.task_id,
            group_id=task.group_id,
            group_size=task.group_size,
            index=index,
            offset=start,
            tokens=self.tokens,
            action_tokens=self.tokens,
            status="finished" if last else "unfinished",
            stop_reason="stop" if last else "",
            env="benchmark",
            version_min=0,
            version_max=0,
            turns=[Turn(0, start, start + 1, False), Turn(1, start + 1, start + self.tokens, True)],
            rewards=[Reward("sent_at", 1, time.monotonic())] if last else [],
            generator="generator-0",
            arrays=self._specs,
        )
        if self._load.samples:
            self._sent_at[segment.trajectory_id] = time.perf_counter()
        peer.send_frames([PRELUDE, _encode(segment), self._body])
        if last:
            peer.send(TaskCredit(tasks=1))
        return True


class Learner:
    """A learner that commits each group at once, puts a new one in its place, and reports checkpoints."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._peer = Peer(load, Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1))
        self._groups = self._step = 0

    def run(self, committed: Any, ages: Any) -> None:
        """Run until killed. Keep in ``ages`` the last times from a trajectory's end to its arrival here."""
        while True:
            self._peer.socket.poll(POLL_MS)
            self._peer.beat(time.monotonic())
            units = 0
            for message, frames in self._peer.received():
                if isinstance(message, Welcome):
                    self._put(self._load.outstanding // GROUP)
                    self._peer.send(DeliveryCredit(units=DELIVERIES))
                elif isinstance(message, Deliver):
                    units += 1
                    self._commit(message.unit_id)
                    committed.value += len(frames) // 2
                    last = _decode_segment(frames[-2])
                    ages[self._step % AGES] = time.monotonic() - last.rewards[0].value
            if units:
                self._peer.send(DeliveryCredit(units=units))
                self._put(units)
            self._peer.leave()

    def _commit(self, unit_id: str) -> None:
        self._step += 1
        self._peer.send(Commit(epoch=1, step=self._step, trained=[unit_id]))
        if self._step % CHECKPOINT_EVERY == 0:
            self._peer.send(Checkpointed(epoch=1, step=self._step))

    def _put(self, groups: int) -> None:
        tasks = []
        for n in range(self._groups, self._groups + groups):
            for member in range(GROUP):
                task_id = f"1g{n}.{member}"
                task = Task(
                    task_id=task_id,
                    env="benchmark",
                    data={"seed": n},
                    group_id=f"1g{n}",
                    group_size=GROUP,
                    member=member,
                    sampling=Sampling(max_trajectory_tokens=1 << 30),
                )
                tasks.append(task)
        self._groups += groups
        for first in range(0, len(tasks), TASKS_PER_MESSAGE):
            self._peer.send(PutTasks(tasks=tasks[first : first + TASKS_PER_MESSAGE]))


def run_actors(load: Load, acked: Any, results: Connection) -> None:
    """Run the actors' process. ``acked`` is a number shared with the benchmark's process."""
    Actors(load).run(acked, results)


def run_learner(load: Load, committed: Any, ages: Any) -> None:
    """Run the learner's process. ``committed`` and ``ages`` are shared with the benchmark's process."""
    Learner(load).run(committed, ages)
