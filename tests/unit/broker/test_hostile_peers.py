"""Test peers, found by fuzzing, whose well-formed messages would have broken or filled the broker."""

import math
from zlib import crc32

import msgspec
import pytest

from broker.core.records import decode_event
from broker.core.state import BrokerState
from broker.errors import JournalError
from broker.journal.claim import LOCK, SECOND, Mark
from broker.journal.opening import survey
from broker.journal.writer import (
    Header,
    Kind,
    Place,
    Record,
    file_name,
    pack_header,
    unpack_header,
    unpack_segment,
)
from broker.output_commit import JournalStore, recover, snapshot
from protocol.codec import decode, encode
from protocol.errors import Malformed
from protocol.messages.episodes import Commit
from protocol.messages.peers import Heartbeat
from tests.broker_driver import Driver, config, evaluation, group
from tests.journals import begin


def test_an_actor_does_not_fill_the_broker_by_saying_hello_again_and_again():
    driver = Driver(max_queued_segments=8, segment_credit=4, heartbeat_s=1000.0)
    driver.learner(credit=0)
    driver.put(*group("g", 1))
    driver.actor()
    (lease,) = driver.leases()
    index = 0
    for _ in range(30):
        while driver.segment("actor", lease, index, offset=4 * index, status="unfinished").status == "stored":
            index += 1
        driver.actor()
    assert driver.held <= 8 + 4


@pytest.mark.parametrize("name", ["g", "e.0"], ids=["a group before it", "a trajectory"])
def test_the_sums_close_when_a_group_has_the_name_of_another_unit(name):
    driver = Driver()
    driver.learner(credit=0)
    driver.actor()
    tasks = [evaluation("e"), *(msgspec.structs.replace(t, task_id=t.task_id + "x") for t in group("g", 1))]
    for task in (*tasks, *group(name, 1)):
        driver.put(task)
        driver.segment("actor", driver.leases()[0])
        assert driver.balanced()
    assert driver.held == 3
    driver.learner()
    driver.commit(*(delivery.unit_id for delivery in driver.deliveries()))
    assert driver.balanced()
    assert driver.held == 0


def test_a_sum_that_no_snapshot_could_hold_is_refused():
    with pytest.raises(Malformed, match="replayed_tokens"):
        decode(encode(Commit(epoch=1, step=1, replayed_tokens=2**64 - 1)))


@pytest.mark.parametrize("progress", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_progress_that_cannot_grow_is_refused(progress):
    # NaN differs from itself, so it would count as progress for ever, and `/status` would be no JSON.
    with pytest.raises(Malformed, match="progress"):
        decode(encode(Heartbeat(progress=progress)))


def test_files_far_apart_are_a_loss_and_cost_no_more_than_others(tmp_path):
    begin(tmp_path / "journal").close()
    (tmp_path / "journal" / file_name(1)).rename(tmp_path / "journal" / file_name(10**11))
    (loss,) = [loss for loss in survey(tmp_path / "journal").losses if "missing" in loss.what]
    assert loss.file == 10**11 - 1
    assert "before it; how many records is not known" in loss.what


def test_a_mark_without_end_is_none(tmp_path):
    begin(tmp_path / "journal").close()
    for name in (LOCK, SECOND):
        (tmp_path / "journal" / name).write_text("9" * 5000)
    assert survey(tmp_path / "journal").mark == Mark()


@pytest.mark.parametrize("content", [b'[["\xff"]]', b"[" * 100_000], ids=["no text", "deep"])
def test_accepted_losses_that_are_no_text_are_named(tmp_path, content):
    begin(tmp_path / "journal").close()
    (tmp_path / "journal" / "accepted-losses.json").write_bytes(content)
    with pytest.raises(JournalError, match="remove the file to be asked again"):
        survey(tmp_path / "journal")


@pytest.mark.parametrize("name", [LOCK, SECOND, "accepted-losses.json"])
def test_a_folder_in_the_place_of_a_file_is_a_journal_error(tmp_path, name):
    begin(tmp_path / "journal").close()
    (tmp_path / "journal" / name).unlink(missing_ok=True)
    (tmp_path / "journal" / name).mkdir()
    with pytest.raises(JournalError, match=name):
        survey(tmp_path / "journal")


def test_the_head_of_a_run_whose_name_is_no_text_is_that_of_another_run():
    data = pack_header(Header("r?", 1, 0, 0))
    fixed = data[:-4].replace(b"r?", b"r\xff")
    head = unpack_header(fixed + crc32(fixed).to_bytes(4, "little"))
    assert head is not None
    assert head[0].run != "r?"


def test_an_event_that_is_no_text_is_a_decode_error():
    with pytest.raises(msgspec.MsgspecError, match="utf-8"):
        decode_event(b"\x81\xa4type\xa5\xff\xff\xff\xff\xff")


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.SEGMENT, b"x"),
        (Kind.SEGMENT, b"\x01\x00\x00\x00\xc1body"),
        (Kind.EVENT, b"\x81\xa4type\xa5\xff\xff\xff\xff\xff"),
        (Kind.SNAPSHOT, b"\x81\xa4type\xa8\xff\xff\xff\xff\xff\xff\xff\xff"),
    ],
    ids=["a segment without a head", "a segment of nonsense", "an event that is no text", "no snapshot"],
)
def test_a_payload_that_is_none_is_named_by_its_place(tmp_path, kind, payload):
    with begin(tmp_path / "journal") as journal:
        store = JournalStore(journal, 1 << 20)
        record = Record(kind, payload, Place(3, 60, len(payload)))
        with pytest.raises(JournalError, match="journal file 3, offset 60"):
            recover(BrokerState(config(), store, 4), store, [record], 0.0)


def test_a_segment_without_a_length_is_a_journal_error():
    with pytest.raises(JournalError, match="a segment of 3 bytes"):
        unpack_segment(b"abc")


def test_a_snapshot_whose_units_are_not_of_its_segments_is_refused(tmp_path):
    driver = Driver(folder=tmp_path / "journal")
    driver.learner(credit=0)
    driver.actor()
    driver.put(*group("g", 1))
    driver.segment("actor", driver.leases()[0])
    tree = msgspec.msgpack.decode(snapshot(driver.dispatcher.state, driver.dispatcher.state.store))
    tree["segments"] = []
    driver.journal.rotate(msgspec.msgpack.encode(tree))
    with pytest.raises(JournalError, match="its units are not of its segments"):
        driver.kill_broker()
