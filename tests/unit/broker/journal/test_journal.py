"""Test the journal: appended records are read again, and are safe when the journal says so."""

import os
import threading

import pytest

from broker.config import JournalConfig
from broker.errors import JournalError
from broker.journal import writer as journal_writer
from broker.journal.writer import Kind, pack_segment, unpack_segment
from tests.journals import DEADLINE_S, begin, contents, small

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


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="lower keep_bytes or raise max_bytes"):
        JournalConfig(keep_bytes=8192, max_bytes=4096)
