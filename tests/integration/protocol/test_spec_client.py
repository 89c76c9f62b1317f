"""SPEC.md is enough: a client written from it alone trains through a real, encrypted broker, whoever is killed."""

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
"""Numbers of trained groups after which the broker is killed, once all clients have joined it."""
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
        # Clients notice a lost connection at once. Slow heartbeats keep leases while a busy machine starts the broker.
        settings = {"heartbeat_s": 2.0, "journal": journal, "folder": tmp_path / "journal"}
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
    trained, ran, seen, repeated = Counter(), Counter(), [], set()
    everybody = {client.name for client in [learner, *actors]}
    here = set()
    deadline = time.monotonic() + PATIENCE_S
    while (at := events.get(timeout=max(0.1, deadline - time.monotonic()))) != ("learner", {"event": "over"}):
        name, event = at
        seen.append(at)
        match event:
            case {"event": "trained", "unit": unit, "segments": segments}:
                assert segments == SIZE * PIECES, event
                trained[unit] += 1
            case {"event": "committed_again", "unit": unit}:
                repeated.add(unit)
            case {"event": "joined"}:
                here.add(name)
            case {"event": "acked", "status": "stored" | "duplicate"}:
                ran[name] += 1
            case {"event": "dropped" | "segment_refused" | "over"}:
                raise AssertionError((at, seen[-20:]))
        if kill_after and len(trained) >= kill_after[0] and here == everybody:
            kill_after.pop(0)
            broker.stop()
            here.clear()
            broker = start_broker()
    assert learner.process.wait(30.0) == 0
    assert not kill_after
    assert trained == Counter({f"g{n}": 1 for n in range(GROUPS)})
    # The learner trained on while there was no broker, so Commits were lost.
    assert repeated <= trained.keys()
    assert repeated
    assert all(ran[actor.name] for actor in actors), ran
    ledger = until(lambda: closed_ledger(broker), "all that was committed is released", PATIENCE_S)
    assert ledger["violation"] == ""
    outcomes = {name: tally["segments"] for name, tally in ledger["outcomes"].items() if tally["segments"]}
    assert outcomes == {"trained": GROUPS * SIZE * PIECES}
    for actor in actors:
        actor.stop()
        assert actor.process.returncode == 0


def test_a_killed_learner_goes_on_from_its_checkpoint(stage, tmp_path):
    start_broker, start_client, events = stage
    checkpoint = tmp_path / "checkpoint.json"
    arguments = ["--groups", "12", "--size", str(SIZE), "--checkpoint", str(checkpoint)]
    broker = start_broker()
    start_client("actor", "actor-0")
    first = start_client("learner", "learner", *arguments)
    # The checkpoint covers five of these seven steps; the other two are made again.
    rolled_back = [await_event(events, "trained")["unit"] for _ in range(7)][5:]
    first.process.kill()
    await_event(events, "over", of="learner")
    kept = set(json.loads(checkpoint.read_text())["done"])
    start_client("learner", "learner", *arguments)
    again = []
    while (event := await_event(events, "trained", "ended", of="learner"))["event"] == "trained":
        again.append(event["unit"])
    assert set(rolled_back) - kept <= set(again)
    assert sorted([*kept, *again]) == sorted(f"g{n}" for n in range(12))
    ledger = until(lambda: closed_ledger(broker), "all that was committed is released", PATIENCE_S)
    outcomes = {name: tally["segments"] for name, tally in ledger["outcomes"].items() if tally["segments"]}
    assert outcomes == {"trained": 12 * SIZE * PIECES}


def test_a_client_whose_key_is_listed_later_joins_without_a_restart(stage, tmp_path):
    start_broker, start_client, events = stage
    listed = tmp_path / "keys" / "actor-gpu7.pub"
    hidden = listed.rename(tmp_path / "actor-gpu7.pub")
    start_broker()
    start_client("actor", "actor-gpu7-0")
    await_event(events, "handshake_refused")
    hidden.rename(listed)
    await_event(events, "joined")


def await_event(events, *kinds, of=""):
    """Return the next event of these kinds, of the client of this name if one is given."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        name, event = events.get(timeout=max(0.1, deadline - time.monotonic()))
        if event["event"] in kinds and of in ("", name):
            return event
        assert event["event"] != "over", (name, event)


def closed_ledger(broker):
    status = broker.status()
    queues = status["queues"]
    return status["ledger"] if queues["segments_held"] == queues["bytes_committed"] == 0 else None
