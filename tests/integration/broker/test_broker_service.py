"""Test the broker in its own process, with real peers on real sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from broker.config import BrokerConfig
from broker.service import serve
from launch.processes import free_ports
from protocol.codec import PRELUDE, decode_delivery, encode, encode_delivery
from protocol.errors import AddressRefused
from protocol.messages.episodes import (
    Commit,
    Deliver,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    SegmentAck,
    SegmentCredit,
    TaskCredit,
)
from protocol.messages.peers import (
    Drain,
    Generators,
    Goodbye,
    Heartbeat,
    Hello,
    PublishWeights,
    QueueStats,
    Refused,
    WeightsReady,
    Welcome,
)
from protocol.sockets import ThreadLink
from tests.broker_driver import group, segment_frames
from tests.hearing import heard

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120.0
PROGRAM = """
import json, logging, sys
from broker.config import BrokerConfig
from broker.service import serve
logging.basicConfig(level="INFO")
serve(BrokerConfig(**json.loads(sys.argv[1])), run="run", max_policy_lag=4)
"""


def until(condition, what):
    """Poll until the condition gives a truthy value. Return that value."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")


class Broker:
    """A running broker process."""

    def __init__(self, *, drain_s=None, **settings):
        patience = "" if drain_s is None else f"import broker.core.dispatch as d; d.DRAIN_S = {drain_s}\n"
        port, http_port = free_ports(2)
        self.endpoint, self.http = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{http_port}"
        settings = {"endpoint": self.endpoint, "http": self.http, "heartbeat_s": 0.2, **settings}
        self.process = subprocess.Popen(
            [sys.executable, "-c", patience + PROGRAM, json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        until(self.answers, "the broker answers /status")

    def answers(self):
        assert self.process.poll() is None, "the broker has ended"
        try:
            return self.status()
        except OSError:
            return None

    def status(self):
        return json.loads(self.get("/status"))

    def get(self, path):
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60.0) as answer:
            return answer.read().decode()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


class Peer:
    """A bare DEALER socket that sends only what a test tells it to send."""

    def __init__(self, broker, hello, context):
        self.name = hello.peer
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, hello.peer.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(broker.endpoint)
        self.seen = []
        self.say(hello)

    def say(self, *messages):
        for message in messages:
            self.socket.send_multipart(encode(message))

    def frames(self, frames):
        self.socket.send_multipart(frames)

    def read(self):
        while self.socket.poll(0):
            messages, rest = heard(self.socket.recv_multipart())
            self.seen += [(message, rest) for message in messages]

    def expect(self, kind, where=lambda message: True):
        """Return the next message of a kind; its body frames go to ``self.rest``."""

        def find():
            self.read()
            for entry in self.seen:
                if isinstance(entry[0], kind) and where(entry[0]):
                    self.seen.remove(entry)
                    self.rest = entry[1]
                    return entry[0]
            return None

        return until(
            find, f"{self.name} gets {kind.__name__}; got {[type(m).__name__ for m, _ in self.seen]}"
        )


@contextmanager
def cleaned(*closeables):
    try:
        yield
    finally:
        for close in closeables:
            close()


class Net:
    """Sockets of one test, closed at its end."""

    def __init__(self):
        self._context, self._sockets = zmq.Context(), []

    def socket(self, kind):
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self):
        for opened in self._sockets:
            opened.close(linger=0)
        self._context.term()


@pytest.fixture
def context():
    net = Net()
    yield net
    net.close()


@pytest.fixture
def broker():
    brokers = []

    def start(**settings):
        brokers.append(Broker(**settings))
        return brokers[-1]

    yield start
    for running in brokers:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def names(broker):
    return {peer["name"] for peer in broker.status()["peers"]}


def learner(broker, context, epoch=1, name="learner", credit=10):
    peer = Peer(broker, Hello(role="learner", peer=name, incarnation=epoch, epoch=epoch), context)
    peer.expect(Welcome)
    peer.say(DeliveryCredit(units=credit))
    return peer


def actor(broker, context, name="actor-0", tasks=8, incarnation=1):
    peer = Peer(broker, Hello(role="actor", peer=name, incarnation=incarnation), context)
    peer.expect(Welcome)
    peer.expect(Generators)
    peer.expect(SegmentCredit)
    peer.say(TaskCredit(tasks=tasks))
    return peer


def test_a_group_from_task_to_commit_and_what_status_says(broker, context):
    broker = broker(heartbeat_s=2.0)
    boss, worker = learner(broker, context), actor(broker, context)
    boss.say(PutTasks(tasks=group("g", 2)))
    for _ in range(2):
        worker.frames(segment_frames(worker.expect(LeaseTask)))
        assert worker.expect(SegmentAck).status == "stored"
    delivery = boss.expect(Deliver)
    segments = decode_delivery(delivery, boss.rest)
    assert [segment.task_id for segment, _ in segments] == ["g.0", "g.1"]
    assert segments[0][1]["token_ids"].tolist() == [0, 1, 2, 3]
    assert broker.status()["queues"]["units_leased"] == 1
    boss.say(Commit(epoch=1, step=1, trained=[delivery.unit_id]))
    status = until(
        lambda: (s := broker.status())["queues"]["segments_held"] == 0 and s, "the commit frees memory"
    )
    assert status["ledger"]["outcomes"]["trained"] == {"segments": 2, "tokens": 8, "action_tokens": 4}
    assert names(broker) == {"learner", "actor-0"}
    assert any("actor-0 waits for tasks" in line for line in status["waits"])
    assert boss.expect(QueueStats).gauges.keys() >= {"broker/queue_depth_segments", "broker/queued_bytes"}
    metrics = broker.get("/metrics")
    assert 'offbeat_tokens_total{outcome="trained"} 8.0' in metrics
    assert "offbeat_broker_tasks_leased 0.0" in metrics
    assert broker.status()["ledger"]["refused"] == {}


def test_a_learner_of_a_higher_epoch_gets_what_the_old_one_held(broker, context):
    broker = broker(heartbeat_s=2.0)
    old, worker = learner(broker, context), actor(broker, context)
    old.say(PutTasks(tasks=group("g", 1)))
    worker.frames(segment_frames(worker.expect(LeaseTask)))
    first = old.expect(Deliver)
    new = learner(broker, context, epoch=2, name="learner-b")
    again = new.expect(Deliver)
    assert (again.unit_id, again.redelivered) == (first.unit_id, True)
    assert old.expect(Refused).code == "stale_epoch"
    old.say(Commit(epoch=1, step=1, trained=[first.unit_id]))
    assert old.expect(Refused).code == "unknown_peer"
    new.say(PublishWeights(epoch=2, version=1, manifest="m"))
    generator = Peer(broker, Hello(role="generator", peer="g0", incarnation=1, endpoint="tcp://x:1"), context)
    assert generator.expect(WeightsReady).version == 1
    assert [info.peer for info in worker.expect(Generators).generators] == ["g0"]


def test_a_new_connection_under_the_old_name_takes_it_over(broker, context):
    broker = broker(heartbeat_s=2.0)
    old, worker = learner(broker, context), actor(broker, context)
    old.say(PutTasks(tasks=group("g", 1)))
    worker.frames(segment_frames(worker.expect(LeaseTask)))
    old.expect(Deliver)
    old.socket.close()
    assert learner(broker, context, epoch=2).expect(Deliver).redelivered


def test_what_a_silent_actor_ran_goes_to_another(broker, context):
    broker = broker(heartbeat_s=0.1)
    link = ThreadLink(broker.endpoint, Hello(role="learner", peer="learner", incarnation=1, epoch=1))
    with cleaned(link.close):
        until(lambda: link.session.joined, "the learner joins")
        link.send(PutTasks(tasks=group("g", 1)))
        silent = actor(broker, context, "silent", tasks=1)
        lease = silent.expect(LeaseTask)
        silent.frames(segment_frames(lease, status="unfinished"))
        silent.expect(SegmentAck)
        until(lambda: "silent" not in names(broker), "the silent actor is given up")
        heir = actor(broker, context, "heir", tasks=1)
        again = heir.expect(LeaseTask)
        assert (again.task.task_id, again.attempt) == (lease.task.task_id, 1)
        silent.say(Heartbeat())
        assert silent.expect(Refused).code == "unknown_peer"
        assert broker.status()["ledger"]["outcomes"]["superseded"]["segments"] == 1


def test_nonsense_is_refused_counted_and_survived(broker, context):
    broker = broker(heartbeat_s=2.0)
    worker = actor(broker, context)
    worker.frames([b"nonsense"])
    assert worker.expect(Refused).code == "malformed"
    worker.frames([b"OB\x09\x00", b"x"])
    refused = worker.expect(Refused)
    assert refused.code == "version"
    assert "protocol 9.0" in refused.message
    worker.frames([PRELUDE, bytes(300_000)])
    assert worker.expect(Refused).code == "limit"
    worker.frames([PRELUDE, b"\xc1"])
    assert worker.expect(Refused).code == "malformed"
    worker.frames(encode_delivery(Deliver(unit_id="u", segments=0), []))
    assert worker.expect(Refused).code == "unexpected"
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.ROUTING_ID, b"\xff\xfe")
    raw.connect(broker.endpoint)
    raw.send_multipart(encode(Heartbeat()))
    assert raw.poll(5_000)
    ((refused,), _) = heard(raw.recv_multipart())
    assert refused.code == "unknown_peer"
    worker.say(Heartbeat(progress=1.0))
    worker.expect(Heartbeat)
    refused = broker.status()["ledger"]["refused"]
    assert refused == {"limit": 1, "malformed": 2, "unexpected": 1, "unknown_peer": 1, "version": 1}


def test_sigterm_asks_all_to_leave_and_ends_when_they_have(broker, context):
    broker = broker(heartbeat_s=20.0, drain_s=1000.0)
    worker = actor(broker, context)
    broker.process.send_signal(signal.SIGTERM)
    worker.expect(Drain)
    assert broker.process.poll() is None
    worker.say(Goodbye())
    # Without the farewell it would wait longer than this test does, for the silence and for the end of the patience.
    assert broker.process.wait(30.0) == 0


def test_sigterm_ends_a_broker_whose_peers_do_not_answer(broker, context):
    broker = broker(heartbeat_s=2.0)
    actor(broker, context)
    assert broker.stop() == 0


@pytest.mark.parametrize(
    ("endpoint", "http", "text"),
    [
        ("tcp://0.0.0.0:5555", "127.0.0.1:0", "broker.endpoint"),
        ("tcp://*:5555", "127.0.0.1:0", "loopback"),
        ("tcp://192.0.2.7:5555", "127.0.0.1:0", "neither encrypted nor authenticated"),
        ("tcp://127.0.0.1:0", "0.0.0.0:8080", "broker.http"),
        ("tcp://127.0.0.1:0", "127.0.0.1", "host:port"),
    ],
)
def test_addresses_that_others_can_reach_are_refused(endpoint, http, text):
    with pytest.raises(AddressRefused, match=text.replace("*", r"\*")):
        serve(BrokerConfig(endpoint=endpoint, http=http), run="run", max_policy_lag=4)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        program = PROGRAM.replace('level="INFO"', 'level="ERROR"')
        settings = json.dumps({"endpoint": f"tcp://127.0.0.1:{port}", "http": "127.0.0.1:0"})
        ended = subprocess.run(
            [sys.executable, "-c", program, settings],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode != 0
    said = f"broker.endpoint is tcp://127.0.0.1:{port}, but the port is in use by process {os.getpid()}"
    assert said in ended.stderr
