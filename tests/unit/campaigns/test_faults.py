"""A fault campaign breaks things in exactly the way that it reports, and its audit finds what it is there to find."""

import json
import random
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from actors.generator.weights.staging import Announced, Stage
from broker.errors import JournalError
from broker.journal.files import numbers, read_file
from broker.journal.opening import survey
from broker.journal.writer import Kind, file_name
from broker.output_commit import Snapshot, snapshot
from protocol.errors import WeightsError
from protocol.weights.files import write_version
from protocol.weights.format import read_manifest
from tests.broker_driver import Driver, group
from tests.campaigns.faults.audit import Replay, audit, by_log, by_metrics, said_by_learner
from tests.campaigns.faults.edges import half_a_record, somewhere_in_the_middle
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.network import NEEDS_MEMORY, NEEDS_NETWORK, NEEDS_TMPFS, NEEDS_WIRE
from tests.campaigns.faults.program import schedule
from tests.campaigns.faults.proof import (
    acknowledged,
    by_fault,
    failures,
    merged,
    prove,
    read_lines,
    summary,
    table,
)
from tests.campaigns.faults.scene import Flips, Proxy, Swaps
from tests.campaigns.faults.weights import _replace, flipped, mixed, replaced, truncated
from tests.journals import begin, contents

SHAPES = {"a": ("F32", (64, 64))}


def version(root, number):
    array = np.full((64, 64), float(number), "<f4")
    pieces = [("a", memoryview(array.tobytes()))]
    return write_version(root, run="r", epoch=1, version=number, shapes=SHAPES, tensors=pieces)


@pytest.fixture
def stage(tmp_path):
    stage = Stage("r-generator-0", SHAPES, root=tmp_path / "stage")
    yield stage
    stage.close()


def announced(manifest):
    found = read_manifest(manifest)
    return Announced(found.epoch, found.version, str(manifest), (), found.root)


def test_a_version_as_it_was_published_is_taken(tmp_path, stage):
    manifest, data = stage.stage(announced(version(tmp_path, 7)), "r")
    assert manifest.version == 7
    assert data.exists()


@pytest.mark.parametrize("damage", [truncated, flipped, replaced, mixed])
@pytest.mark.parametrize("seed", range(4))
def test_damaged_weights_are_refused(tmp_path, stage, damage, seed):
    older, newer = version(tmp_path, 6), version(tmp_path, 7)
    told = announced(newer)
    _replace(newer.parent, older.parent, damage, random.Random(seed))
    with pytest.raises(WeightsError):
        stage.stage(told, "r")
    assert sorted(path.name for path in tmp_path.glob("v*")) == [older.parent.name, newer.parent.name]
    assert not list(tmp_path.glob("damaged")) + list(tmp_path.glob("removed"))


# --- journal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    with begin(tmp_path / "journal") as journal:
        for number in range(20):
            journal.append(Kind.EVENT, b"event %d" % number)
        journal.flush()
    return tmp_path / "journal"


@pytest.mark.parametrize("seed", range(8))
def test_a_flip_in_the_middle_is_damage_and_no_torn_end(folder, seed):
    path, offset = somewhere_in_the_middle(folder, random.Random(seed))
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert survey(folder).torn is None
    with pytest.raises(JournalError, match=path.name):
        contents(folder)


@pytest.mark.parametrize("seed", range(8))
def test_half_a_record_is_a_torn_end(folder, seed):
    before = contents(folder)
    path = folder / file_name(numbers(folder)[-1])
    with open(path, "ab") as file:
        file.write(half_a_record(read_file(folder, numbers(folder)[-1]), random.Random(seed)))
    here = survey(folder)
    assert here.torn is not None
    assert here.losses == []
    assert contents(folder) == before


# --- schedule ---------------------------------------------------------------------------------------------------


def test_a_schedule_has_each_kind_and_is_the_same_again():
    planned = schedule(list(KINDS), 210, seed=7)
    assert set(planned) == set(KINDS)
    assert len(planned) == 210
    assert planned != sorted(planned)
    assert planned == schedule(list(KINDS), 210, seed=7)


def test_what_a_stage_is_built_for_exists():
    assert set(NEEDS_MEMORY + NEEDS_NETWORK + NEEDS_TMPFS + NEEDS_WIRE) <= set(KINDS)


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


@pytest.fixture
def run(tmp_path):
    """Return the driver of a run folder: one unit is in a checkpoint, one was trained after it, one waits."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    driver = Driver(folder=folder / "journal", heartbeat_s=1.0, task_lease_s=1000.0)
    settings = driver.config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps({"broker": settings}))
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    driver.put(*group("a", 2), *group("b", 2), *group("c", 2))
    for lease in driver.leases():
        driver.segment("actor", lease)
    driver.deliveries()
    driver.commit("a", step=1)
    driver.checkpointed(1)
    driver.commit("b", step=2)
    driver.run = folder
    return driver


def end(driver):
    driver.flush()
    driver.journal.close()
    return audit(driver.run)


def test_a_run_with_nothing_wrong(run):
    run.kill_broker()
    run.flush(rotate=True)
    run.learner(epoch=2, lineage=1, step=1)
    run.commit("b", epoch=2, step=2)
    run.commit("c", epoch=2, step=3)
    run.flush(rotate=True)
    found = end(run)
    assert found.wrong == []
    assert (found.segments, found.snapshots, found.lineages) == (6, 2, 1)
    assert found.units == {"a": 1, "b": 2, "c": 3}
    assert {key: step for key, step in found.trained.items() if step == 2} == {
        ("b.0.0", 0): 2,
        ("b.1.0", 0): 2,
    }
    assert found.tokens == {1: 4, 2: 4, 3: 4}


def test_what_a_learner_took_with_it_is_out_of_the_line(run):
    run.learner(epoch=2, lineage=1, step=1)
    found = end(run)
    assert found.wrong == []
    assert found.units == {"a": 1}


def test_units_that_are_gone_with_a_learner_are_found(run):
    # The new learner goes back behind the checkpoint that the old one reported.
    run.learner(epoch=2, lineage=1, step=0, step_back=True)
    assert any("gone with a learner" in text and "a.0.0" in text for text in end(run).wrong)


def test_a_broker_that_forgets_is_found_by_its_snapshot(run):
    saved = msgspec.msgpack.decode(snapshot(run.dispatcher.state, run.dispatcher.state.store), type=Snapshot)
    fewer = msgspec.structs.replace(saved, units=[unit for unit in saved.units if unit.unit_id != "c"])
    run.journal.append(Kind.SNAPSHOT, msgspec.msgpack.encode(fewer))
    assert any(text.startswith("snapshot 1, units") and "'c'" in text for text in end(run).wrong)


def test_two_attempts_of_one_task_are_found(run):
    replay = Replay(run.config)
    replay.audit.trained = {("a.0.0", 0): 1, ("a.0.1", 0): 2, ("a.1.0", 0): 2}
    assert replay.end().trained_twice == ["task a.0, as ['a.0.0', 'a.0.1']"]


def test_files_that_were_deleted_are_no_proof(run):
    run.flush()
    (run.run / "journal" / "journal-00000001.released").touch()
    assert "keep_bytes" in end(run).wrong[0]


def test_a_learner_that_trained_what_nobody_committed_is_found(run):
    lines = [{"step": 1, "learner/trained_tokens": 4.0}, {"step": 2, "learner/trained_tokens": 8.0}]
    (run.run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert end(run).wrong == ["step 2 trained 8 tokens, 4 were committed"]


def test_replayed_tokens_are_not_held_against_it(tmp_path):
    line = {"step": 2, "learner/trained_tokens": 8.0, "learner/replayed_tokens": 4.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    assert by_metrics({2: 4}, tmp_path / "metrics.jsonl") == []


def test_steps_done_again_undo_those_behind_them(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("DEBUG step 1 trained a\nx step 2 trained b c\nx step 3 trained d\nx step 2 trained d b\n")
    assert said_by_learner(log) == {"a": [1], "d": [2], "b": [2]}
    assert by_log({"a": 1, "d": 2, "b": 2}, log) == []
    assert by_log({"a": 1, "d": 2, "b": 3}, log) == ["the learner's log has b at step 2, the journal at 3"]


def test_a_unit_trained_twice_is_found_in_the_log_though_the_journal_has_it_once(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("step 1 trained a b\nstep 2 trained b c\n")
    assert by_log({"a": 1, "b": 2, "c": 2}, log)[0] == "the learner's log has b at steps [1, 2]"


# --- segments ---------------------------------------------------------------------------------------------------


def test_a_segment_an_actor_was_told_of_and_that_is_not_there_is_lost(run):
    logs = run.run / "logs"
    (logs / "actor-0.log").write_text("segment 0 of a.0.0: stored\n")
    (logs / "actor-1.log").write_text("segment 0 of b.1.0: stored\nsegment 1 of b.1.0: stored\n")
    run.flush()
    run.journal.close()
    results = [
        {"kind": "kill broker", "log_bytes": {"actor-0.log": 27, "actor-1.log": 27}},
        {"kind": "kill actor", "log_bytes": {"actor-0.log": 27, "actor-1.log": 54}},
    ]
    proof = prove(run.run, results)
    assert (proof.acknowledged, proof.lost) == (3, [("b.1.0", 1)])
    assert proof.by_fault == {"kill broker": [2, 0, 0], "kill actor": [1, 1, 0]}
    assert proof.audit == []


def test_what_was_acknowledged_before_the_first_fault_ended_belongs_to_it(tmp_path):
    (tmp_path / "actor-0.log").write_text("segment 0 of t.0: stored\nsegment 1 of t.0: stored\n")
    said = acknowledged(tmp_path)
    results = [{"kind": "k", "log_bytes": {"actor-0.log": 25}}]
    assert by_fault(said, results, lost=[], twice=[("t.0", 0)]) == {"k": [1, 0, 1]}


# --- results ----------------------------------------------------------------------------------------------------


def test_lines_that_were_cut_are_left_out(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"kind": "a"}\n{"kin')
    assert read_lines(path) == [{"kind": "a"}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_campaign_in_two_parts_adds_up():
    proof = {"lost": [], "outcomes": {"stale": 1}, "violation": ""}
    other = {"lost": [["t.0", 1]], "outcomes": {"stale": 2, "late": 1}, "violation": "", "audit": []}
    both = merged({"proof": proof, "exit_code": 3}, {"proof": other, "exit_code": 0, "results": [1, 2]})
    assert both["proof"]["lost"] == [["t.0", 1]]
    assert both["proof"]["outcomes"] == {"stale": 3, "late": 1}
    assert (both["results"], both["exit_code"]) == ([1, 2], 3)


def test_anything_wrong_fails_a_campaign():
    good = {"results": [{"kind": "k"}], "proof": {"lost": [], "audit": []}, "exit_code": 0}
    assert failures(good) == []
    for wrong in (
        {"proof": {"lost": [["t", 0]]}},
        {"proof": {"audit": ["x"]}},
        {"deadlock": "why"},
        {"exit_code": 1},
        {"results": [{"kind": "k", "error": "let in"}]},
    ):
        assert len(failures(good | wrong)) == 1


def test_the_table_of_a_campaign_under_way():
    results = [{"kind": "k", "seconds": s, "recovered": True} for s in (3.0, 1.0, 2.0)]
    results.append({"kind": "k", "seconds": 9.0, "recovered": False})
    assert summary(results, {}) == [["k", "4", "3", "2.0", "3.0", "-", "-", "-"]]
    assert table({"results": results}).splitlines()[-1].startswith("| **all** | **4** | **3** |")
