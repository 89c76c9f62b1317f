"""SPEC.md is enough: a client written from it alone trains through a real, encrypted broker that is killed."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from protocol.security import key_files
from tests.integration.protocol.encrypted_harness import ROOT, Broker, until

CLIENT = ROOT / "tests" / "spec_client.py"
GROUPS, SIZE, PIECES = 40, 2, 3
KILLED_AFTER = (3, 11, 19)
"""Numbers of trained groups after which the broker is killed; the last leaves time for the others to notice."""
PATIENCE_S = 120.0


class Client:
    """A process of the client. The isolated mode of Python keeps Offbeat off its path."""

    def __init__(self, role, broker, keys, name, events, *more):
        self.name, self.joins = name, 0
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(CLIENT), role, broker.endpoint, str(keys), "--name", name, *more],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._reader.start()

    def _read(self, events):
        for line in self.process.stdout:
            events.put((self.name, json.loads(line)))
        events.put((self.name, {"event": "over"}))

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30.0)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(30.0)
            self.process.stdout.close()


@pytest.fixture
def stage(tmp_path):
    """Start the broker and the three clients, and stop whatever runs in the end."""
    keys = tmp_path / "keys"
    key_files.make(keys, ["broker", "learner", "generator", "actor", "actor-gpu7"])
    journal = {"file_bytes": 65_536, "keep_bytes": 0}
    endpoint, brokers, clients, events = "", [], [], queue.SimpleQueue()

    def start_broker():
        settings = {"heartbeat_s": 0.5, "journal": journal, "folder": tmp_path / "journal"}
        at = brokers[-1].endpoint if brokers else endpoint
        brokers.append(Broker(keys, tmp_path / "broker.log", endpoint=at, **settings))
        return brokers[-1]

    def start_client(role, name, *more):
        clients.append(Client(role, brokers[-1], keys, name, events, *more))
        return clients[-1]

    yield start_broker, start_client, events
    for client in clients:
        client.stop()
    for broker in brokers:
        broker.stop()


def test_forty_groups_are_trained_once_although_the_broker_is_killed_three_times(stage, tmp_path):
    start_broker, start_client, events = stage
    broker, kill_after = start_broker(), list(KILLED_AFTER)
    learner = start_client(
        "learner", "learner", "--groups", str(GROUPS), "--size", str(SIZE),
        "--checkpoint", str(tmp_path / "checkpoint.json"),
    )  # fmt: skip
    actors = [start_client("actor", "actor-0"), start_client("actor", "actor-gpu7-0")]
    trained, joins, ran, seen = Counter(), Counter(), Counter(), []
    deadline = time.monotonic() + PATIENCE_S
    while (at := events.get(timeout=max(0.1, deadline - time.monotonic()))) != ("learner", {"event": "over"}):
        name, event = at
        seen.append(at)
        match event:
            case {"event": "trained", "unit": unit, "segments": segments}:
                assert segments == SIZE * PIECES, event
                trained[unit] += 1
            case {"event": "joined"}:
                joins[name] += 1
            case {"event": "acked", "status": "stored" | "duplicate"}:
                ran[name] += 1
            case {"event": "dropped" | "segment_refused" | "over"}:
                raise AssertionError((at, seen[-20:]))
        if kill_after and len(trained) >= kill_after[0]:
            kill_after.pop(0)
            broker.stop()
            broker = start_broker()
    assert learner.process.wait(30.0) == 0
    assert not kill_after
    assert trained == Counter({f"g{n}": 1 for n in range(GROUPS)})
    # All of them were there before and after each kill, and both actors had work.
    assert all(joins[client.name] > len(KILLED_AFTER) for client in [learner, *actors]), joins
    assert all(ran[actor.name] for actor in actors), ran
    ledger = until(lambda: closed_ledger(broker), "all that was committed is released", PATIENCE_S)
    assert ledger["violation"] == ""
    outcomes = {name: tally["segments"] for name, tally in ledger["outcomes"].items() if tally["segments"]}
    assert outcomes == {"trained": GROUPS * SIZE * PIECES}
    for actor in actors:
        actor.stop()
        assert actor.process.returncode == 0


def test_a_client_whose_key_is_listed_later_joins_without_a_restart(stage, tmp_path):
    start_broker, start_client, events = stage
    listed = tmp_path / "keys" / "actor-gpu7.pub"
    hidden = listed.rename(tmp_path / "actor-gpu7.pub")
    start_broker()
    start_client("actor", "actor-gpu7-0")
    await_event(events, "handshake_refused")
    hidden.rename(listed)
    await_event(events, "joined")


def await_event(events, kind):
    deadline = time.monotonic() + PATIENCE_S
    while (event := events.get(timeout=max(0.1, deadline - time.monotonic()))[1])["event"] != kind:
        assert event["event"] != "over", event


def closed_ledger(broker):
    status = broker.status()
    queues = status["queues"]
    return status["ledger"] if queues["segments_held"] == queues["bytes_committed"] == 0 else None
