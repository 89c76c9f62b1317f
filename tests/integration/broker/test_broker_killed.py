"""Kill the real broker process with SIGKILL, repeatedly, under an actor and a learner that check it.

The actor records what was acknowledged; the learner records what was delivered and committed.
"""

import json
import os
import queue
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from actors.uplink import LeaseBook, Outbox
from launch.processes import free_ports
from protocol.codec import decode_delivery
from protocol.messages.episodes import (
    CancelTask,
    Checkpointed,
    Commit,
    Deliver,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    SegmentAck,
    SegmentCredit,
)
from protocol.messages.peers import Hello
from protocol.sockets import ThreadLink
from tests.broker_driver import group, segment_frames

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, logging, sys
from pathlib import Path
from broker.config import BrokerConfig
from broker.service import serve
logging.basicConfig(level="INFO")
serve(BrokerConfig(**json.loads(sys.argv[1])), run="run", max_policy_lag=4, journal=Path(sys.argv[2]))
"""
GROUPS, SIZE, PIECES, KILLS = 120, 2, 3, 6


class Broker:
    """A broker process that can be killed and restarted with its ports and journal."""

    def __init__(self, folder, **settings):
        port, http_port = free_ports(2)
        self.endpoint, self.http = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{http_port}"
        self.settings = {"endpoint": self.endpoint, "http": self.http, "heartbeat_s": 0.2, **settings}
        self.folder, self.process = folder, None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(self.settings), str(self.folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def kill(self):
        self.process.kill()
        self.process.wait()


class Link(ThreadLink):
    """A link that hands out its messages when `drain` is called."""

    def drain(self):
        while True:
            try:
                item = self.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Exception):
                raise item
            yield item


class Actor:
    """An actor that runs each task as `PIECES` segments and resends what is not acknowledged."""

    def __init__(self, broker):
        self.link = Link(broker.endpoint, Hello(role="actor", peer="actor", incarnation=1))
        self.outbox, self.book = Outbox(), LeaseBook(16)
        self.book.served(by_any=True)
        self.joins = 0
        self.acknowledged = set()

    def pump(self):
        for item in self.link.drain():
            if item is None:
                # Credit belongs to a join: the link may have joined again meanwhile.
                self.joins += 1
                self.outbox.rejoined()
                if credit := self.book.joined():
                    self.link.send(credit, join=self.joins)
                continue
            match item[0]:
                case LeaseTask() as lease if self.book.leased(lease):
                    self.run(lease)
                case LeaseTask():
                    # The broker sends a lease again after a join.
                    assert self.book.knows(item[0].lease_id)
                case SegmentCredit(segments=segments):
                    self.outbox.granted(segments)
                case SegmentAck() as ack:
                    assert ack.status != "refused", ack
                    self.acknowledged.add((ack.trajectory_id, ack.index))
                    self.outbox.acked(ack)
                    if ack.index == PIECES - 1 and (lease := self.book.lease_of(ack.trajectory_id)):
                        self.link.send(self.book.ended(lease), join=self.joins)
                case CancelTask() as cancelled:
                    raise AssertionError(cancelled)
        for frames in self.outbox.due():
            self.link.send_frames(frames)

    def run(self, lease):
        for index in range(PIECES):
            status = "finished" if index == PIECES - 1 else "unfinished"
            frames = segment_frames(lease, index, offset=4 * index, status=status)
            self.outbox.offer_frames((lease.trajectory_id, index), frames)


class Learner:
    """A learner that commits the units it gets, one group a step, and reports a checkpoint now and then."""

    def __init__(self, broker):
        hello = Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1)
        self.link = Link(broker.endpoint, hello)
        self.tasks = [task for n in range(GROUPS) for task in group(f"1g{n}", SIZE)]
        self.trained, self.step = Counter(), 0

    def pump(self):
        for item in self.link.drain():
            if item is None:
                waiting = [task for task in self.tasks if task.group_id not in self.trained]
                self.link.send(PutTasks(tasks=waiting))
                self.link.send(DeliveryCredit(units=8))
            elif isinstance(item[0], Deliver):
                self.delivered(*item)

    def delivered(self, message, rest):
        segments = [segment for segment, _ in decode_delivery(message, rest)]
        assert len(segments) == SIZE * PIECES
        if message.unit_id not in self.trained:
            self.trained[message.unit_id] += 1
            self.step += 1
        self.link.send(Commit(epoch=1, step=self.step, trained=[message.unit_id]))
        self.link.send(DeliveryCredit(units=1))
        if self.step % 7 == 0:
            self.link.send(Checkpointed(epoch=1, step=self.step - 2))


@pytest.mark.parametrize("durability", ["written", "synced"])
def test_nothing_is_lost_or_doubled_when_the_broker_is_killed_again_and_again(tmp_path, durability):
    journal = {"durability": durability, "file_bytes": 65_536, "keep_bytes": 0}
    broker = Broker(tmp_path / "journal", journal=journal)
    actor, learner = Actor(broker), Learner(broker)
    rng = random.Random(7)
    kill_at = sorted(rng.sample(range(5, GROUPS - 10), KILLS))

    def go_on():
        actor.pump()
        learner.pump()
        if kill_at and len(learner.trained) >= kill_at[0]:
            kill_at.pop(0)
            broker.kill()
            broker.start()
        time.sleep(0.001)
        return len(learner.trained) == GROUPS and actor.outbox.empty

    try:
        deadline = time.monotonic() + 240.0
        while not go_on():
            assert time.monotonic() < deadline, (
                f"{len(learner.trained)} of {GROUPS} groups, kills left {kill_at}, status {status_of(broker)}"
            )
        assert set(learner.trained.values()) == {1}
        # No task ran twice, and none was lost.
        assert len(actor.acknowledged) == GROUPS * SIZE * PIECES
        while (status := settled(broker)) is None:
            assert time.monotonic() < deadline, f"what is committed is not let go: {status_of(broker)}"
            go_on()
            learner.link.send(Checkpointed(epoch=1, step=learner.step))
        outcomes = {name: tally["segments"] for name, tally in status["ledger"]["outcomes"].items()}
        assert outcomes.pop("trained") == GROUPS * SIZE * PIECES
        assert not any(outcomes.values()), outcomes
        assert status["ledger"]["violation"] == ""
    finally:
        actor.link.close()
        learner.link.close()
        broker.kill()


def status_of(broker):
    with urllib.request.urlopen(f"http://{broker.http}/status", timeout=60.0) as answer:
        return json.loads(answer.read())


def settled(broker):
    status = status_of(broker)
    queues = status["queues"]
    return status if queues["segments_held"] == queues["bytes_committed"] == 0 else None
