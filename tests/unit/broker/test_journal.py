"""Test the journal: appended records are read again, files follow each other, nothing needed is deleted."""

import errno
import fcntl
import os
import threading
from zlib import crc32

import pytest

from broker.errors import JournalError
from broker.journal import writer as journal_writer
from broker.journal.config import JournalConfig
from broker.journal.files import numbers
from broker.journal.journal import Journal
from broker.journal.mark import LOCK, read_mark
from broker.journal.records import Kind, pack_segment, unpack_segment
from tests.journals import DEADLINE_S, begin, contents, files, small

MODES = ("written", "synced")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


@pytest.mark.parametrize("durability", MODES)
def test_what_was_appended_is_there_again(folder, durability):
    with begin(folder, small(durability=durability)) as journal:
        assert list(journal.recovered()) == []
        journal.append(Kind.EVENT, b"one")
        place = journal.append(Kind.SEGMENT, *pack_segment(b"header", b"body"))
        assert journal.read(place) == b"".join(pack_segment(b"header", b"body"))  # from the buffer
        journal.append(Kind.DEAD, b"")
        assert journal.sync(DEADLINE_S)
        assert journal.sequence == journal.durable == 3
        assert unpack_segment(journal.read(place)) == (b"header", b"body")
    with begin(folder) as journal:
        records = list(journal.recovered())
        assert [record.kind for record in records] == [Kind.EVENT, Kind.SEGMENT, Kind.DEAD]
        assert records[1].place == place
        assert journal.read(place) == records[1].payload
        assert journal.sequence == journal.durable == 0
        journal.append(Kind.EVENT, b"more")
    assert contents(folder) == [b"one", records[1].payload, b"", b"more"]


def test_written_is_durable_when_flush_returns(folder):
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        for i in range(5):
            journal.append(Kind.EVENT, b"%d" % i)
            assert (journal.sequence, journal.durable) == (i + 1, i)
            journal.flush()
            assert journal.durable == i + 1
        journal.append(Kind.EVENT, b"never flushed")
        journal.abandon()
    assert contents(folder) == [b"0", b"1", b"2", b"3", b"4"]


def test_synced_is_durable_only_after_fdatasync_and_what_comes_meanwhile_is_the_next_group(
    folder, monkeypatch
):
    started, go, groups = threading.Semaphore(0), threading.Semaphore(0), []
    sync = os.fdatasync

    def held(fd):
        # The mark of what is durable is synced now and then, too, on a slow machine in the middle of this test.
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
            return sync(fd)
        started.release()
        assert go.acquire(timeout=DEADLINE_S)
        return sync(fd)

    told = threading.Semaphore(0)
    with begin(folder, small(durability="synced"), on_durable=told.release) as journal:
        assert journal.sync(DEADLINE_S)
        monkeypatch.setattr(journal_writer.os, "fdatasync", held)
        journal.append(Kind.EVENT, b"first")
        journal.flush()
        assert started.acquire(timeout=DEADLINE_S)
        for i in range(9):
            journal.append(Kind.EVENT, b"%d" % i)
            journal.flush()
        assert (journal.sequence, journal.durable) == (10, 0)
        for reached in (1, 10):
            go.release()
            assert told.acquire(timeout=DEADLINE_S)
            groups.append(journal.durable)
            assert reached in groups
            if reached == 1:
                assert started.acquire(timeout=DEADLINE_S)
        monkeypatch.undo()
    assert groups == [1, 10]


def test_in_mode_written_the_thread_syncs_by_itself(folder, monkeypatch):
    synced, sync = threading.Event(), os.fdatasync
    with begin(folder, small(sync_interval_s=0.001)) as journal:
        monkeypatch.setattr(journal_writer.os, "fdatasync", lambda fd: (sync(fd), synced.set()))
        journal.append(Kind.EVENT, b"x")
        journal.flush()
        assert synced.wait(DEADLINE_S)
        monkeypatch.undo()


def test_a_disk_that_loses_what_it_had_ends_the_broker(folder, monkeypatch):
    told = threading.Event()

    def fails(fd):
        raise OSError(5, "Input/output error")

    with begin(folder, small(durability="synced"), on_durable=told.set) as journal:
        assert journal.sync(DEADLINE_S)
        monkeypatch.setattr(journal_writer.os, "fdatasync", fails)
        journal.append(Kind.EVENT, b"x")
        journal.flush()
        assert told.wait(DEADLINE_S)
        assert journal.durable == 0
        with pytest.raises(JournalError, match="did not keep what it had taken"):
            journal.flush()
        monkeypatch.undo()


# --- files --------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("broker.journal.space.SPACE_S", 0.0)
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


# --- ownership ----------------------------------------------------------------------------------------------


def test_one_broker_at_a_time(folder):
    with begin(folder), pytest.raises(JournalError, match="in use by another broker"):
        begin(folder)
    begin(folder).close()


def test_deleting_the_lock_does_not_let_a_second_broker_in(folder):
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        (folder / LOCK).unlink()
        with pytest.raises(JournalError, match="in use by another broker"):
            begin(folder)
        journal.append(Kind.EVENT, b"e")
        assert journal.sync(DEADLINE_S)
        # The next sync makes the lock again, with its mark, and a broker of an earlier version finds it locked.
        assert read_mark(folder).nbytes == journal.nbytes
        with open(folder / LOCK, "rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert contents(folder) == [b"e"]


def test_a_broker_of_an_earlier_version_keeps_a_new_one_out(folder):
    begin(folder).close()
    with open(folder / LOCK, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(JournalError, match="in use by another broker"):
            begin(folder)
    begin(folder).close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_broker_whose_folder_was_removed_or_replaced_ends(folder, replaced):
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        folder.rename(folder.with_name("elsewhere"))
        if replaced:
            begin(folder).close()
        journal.append(Kind.EVENT, b"e")
        journal.flush()
        assert not journal.sync(DEADLINE_S)
        with pytest.raises(JournalError, match="was removed or replaced while the broker used it"):
            journal.flush()
        if replaced:
            assert numbers(folder) == [1]


def test_a_file_system_that_locks_no_folders_will_do(folder, monkeypatch):
    original = fcntl.flock

    def flock(fd, how):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        original(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with begin(folder), pytest.raises(JournalError, match="in use by another broker"):
        begin(folder)


def test_another_runs_journal_is_refused(folder):
    begin(folder).close()
    with pytest.raises(JournalError, match="belongs to run 'run', this is 'other'"):
        Journal.open(folder, run="other", config=JournalConfig())
    begin(folder).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="file/journal: Not a directory"):
        begin(tmp_path / "file" / "journal")


def test_another_format_is_refused(folder):
    begin(folder).close()
    path = folder / "journal-00000001.log"
    data = bytearray(path.read_bytes())
    data[8] = 9
    data[-4:] = crc32(data[:-4]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(JournalError, match="format 9, this program reads 1"):
        begin(folder)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="lower keep_bytes or raise max_bytes"):
        JournalConfig(keep_bytes=8192, max_bytes=4096)
