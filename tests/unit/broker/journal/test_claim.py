"""One process holds a journal's folder; the folder of another run or format is refused."""

import errno
import fcntl
import os
import stat
from zlib import crc32

import pytest

from broker.config import JournalConfig
from broker.errors import JournalError
from broker.journal.claim import LOCK, read_mark
from broker.journal.files import numbers
from broker.journal.journal import Journal
from broker.journal.writer import Kind
from tests.journals import DEADLINE_S, begin, contents, small


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


def test_one_broker_at_a_time(folder):
    with begin(folder), pytest.raises(JournalError, match="in use by another broker"):
        begin(folder)
    begin(folder).close()


def test_nobody_else_reads_the_names_and_sizes_of_a_journal(folder):
    with begin(folder) as journal:
        journal.append(Kind.EVENT, b"e")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


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
