"""Files of the journal follow each other, and nothing needed is deleted."""

import os
import threading

import pytest

from broker.errors import JournalError
from broker.journal import writer as journal_writer
from broker.journal.files import numbers
from broker.journal.writer import Kind
from tests.journals import DEADLINE_S, begin, contents, files, small

MODES = ("written", "synced")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


def test_a_new_file_begins_with_a_snapshot_and_only_what_follows_is_read_again(folder):
    with begin(folder, small(file_bytes=4096)) as journal:
        assert not journal.wants_snapshot
        place = journal.append(Kind.SEGMENT, b"s" * 5000)
        assert journal.wants_snapshot
        assert journal.rotate(b"state").file == 2
        assert not journal.wants_snapshot
        journal.append(Kind.EVENT, b"e")
        journal.flush()
        assert journal.read(place) == b"s" * 5000
        assert journal.nbytes == sum(files(folder).values())
    with begin(folder) as journal:
        found = [(record.kind, record.payload) for record in journal.recovered()]
        assert found == [(Kind.SNAPSHOT, b"state"), (Kind.EVENT, b"e")]
        assert journal.read(place) == b"s" * 5000


def rotated(journal, count):
    """Write ``count`` files with one segment each. Return the segments' places."""
    places = []
    for i in range(count):
        places.append(journal.append(Kind.SEGMENT, b"%d" % i * 1000))
        journal.rotate(b"snapshot %d" % i)
    assert journal.sync(DEADLINE_S)
    return places


def test_files_are_deleted_oldest_first_down_to_what_is_kept(folder):
    with begin(folder, small(keep_bytes=3000)) as journal:
        rotated(journal, 5)
        assert numbers(folder) == [1, 2, 3, 4, 5, 6]
        journal.retain([])
        assert numbers(folder) == [4, 5, 6]
        assert journal.nbytes <= 3000
        assert journal.nbytes == sum(files(folder).values())
    assert contents(folder) == [b"snapshot 4"]


def test_needed_files_stay_and_what_was_deleted_between_them_is_not_missed(folder):
    with begin(folder, small(keep_bytes=0)) as journal:
        places = rotated(journal, 6)
        journal.retain({2, 5})
        assert numbers(folder) == [2, 5, 7]
    with begin(folder, small(keep_bytes=0)) as journal:
        assert [journal.read(places[i]) for i in (1, 4)] == [b"1" * 1000, b"4" * 1000]
        assert journal.holds(places[1])
        assert not journal.holds(places[2])
        with pytest.raises(JournalError, match="journal-00000003"):
            journal.read(places[2])
        journal.rotate(b"last")
        assert journal.sync(DEADLINE_S)
        journal.retain([])
        assert numbers(folder) == [8]
        assert numbers(folder, ".released") == [7]
    assert contents(folder) == [b"last"]


def test_nothing_is_deleted_before_the_disk_has_the_snapshot(folder):
    with begin(folder, small(keep_bytes=0, sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"e")
        journal.rotate(b"snapshot")
        journal.retain([])
        journal.flush()
        assert numbers(folder) == [1, 2]
        assert journal.sync(DEADLINE_S)
        journal.flush()
        assert numbers(folder) == [2]


@pytest.mark.parametrize("durability", MODES)
def test_nothing_is_deleted_before_the_disk_has_what_made_it_needless(folder, monkeypatch, durability):
    go = threading.Event()
    with begin(folder, small(keep_bytes=0, sync_interval_s=1e6, durability=durability)) as journal:
        place = journal.append(Kind.SEGMENT, b"s")
        journal.rotate(b"snapshot")
        assert journal.sync(DEADLINE_S)
        sync = os.fdatasync
        monkeypatch.setattr(journal_writer.os, "fdatasync", lambda fd: go.wait(DEADLINE_S) and sync(fd))
        journal.append(Kind.EVENT, b"the segment is not needed any more")
        journal.flush()
        journal.retain([])
        journal.append(Kind.EVENT, b"what comes later is not waited for")
        journal.retain([])
        journal.flush()
        assert numbers(folder) == [1, 2]
        assert journal.read(place) == b"s"
        go.set()
        assert journal.sync(DEADLINE_S)
        journal.flush()
        assert numbers(folder) == [2]


def test_a_segment_written_after_retain_was_asked_is_not_deleted(folder):
    with begin(folder, small(keep_bytes=0, sync_interval_s=1e6)) as journal:
        journal.rotate(b"one")
        journal.retain([])
        place = journal.append(Kind.SEGMENT, b"s")
        journal.rotate(b"two")
        assert journal.sync(DEADLINE_S)
        journal.flush()
        assert journal.read(place) == b"s"
        assert numbers(folder) == [2, 3]


def test_a_deletion_that_was_interrupted_is_finished(folder):
    with begin(folder, small(keep_bytes=1 << 20)) as journal:
        rotated(journal, 2)
    (folder / "journal-00000001.log").rename(folder / "journal-00000001.released")
    with begin(folder):
        assert (folder / "journal-00000001.released").stat().st_size == 0
        assert numbers(folder) == [2, 3]


def test_it_says_when_room_is_low(folder, monkeypatch):
    monkeypatch.setattr("broker.journal.journal.SPACE_S", 0.0)
    with begin(folder, small(max_bytes=4096, keep_bytes=4096)) as journal:
        assert not journal.low
        journal.append(Kind.EVENT, b"x" * 5000)
        assert journal.low
        journal.flush()
        journal.rotate(b"")
        assert journal.sync(DEADLINE_S)
        journal.retain([1])
        assert journal.low
        journal.retain([])
        assert not journal.low
        assert journal.why_low == ""
    with begin(folder, small(min_free_bytes=1 << 60)) as journal:
        assert journal.low
        assert "broker.journal.min_free_bytes is" in journal.why_low


def test_a_file_grows_to_several_times_its_snapshot_before_the_next_one(folder):
    with begin(folder, small(file_bytes=4096)) as journal:
        journal.rotate(b"s" * 10_000)
        for reopened in (False, True):
            assert not journal.wants_snapshot, reopened
            if not reopened:
                journal.append(Kind.EVENT, b"e" * 25_000)
                assert not journal.wants_snapshot
                journal.close()
                journal = begin(folder, small(file_bytes=4096)).thing
        journal.append(Kind.EVENT, b"e" * 10_000)
        assert journal.wants_snapshot
        journal.rotate(b"small again")
        journal.append(Kind.EVENT, b"e" * 5_000)
        assert journal.wants_snapshot
        journal.close()


def test_a_snapshot_that_is_postponed_is_wanted_again_when_the_file_has_grown_by_its_size(folder, caplog):
    with begin(folder, small(file_bytes=4096)) as journal:
        journal.append(Kind.EVENT, b"e" * 5_000)
        journal.postpone(3_000)
        assert "journal goes on in journal-00000001.log" in caplog.text
        assert not journal.wants_snapshot
        journal.append(Kind.EVENT, b"e" * 2_900)
        assert not journal.wants_snapshot
        journal.append(Kind.EVENT, b"e" * 200)
        assert journal.wants_snapshot
