"""A full disk takes part of a write, then nothing: no hole, no double record, nothing durable too early."""

import errno
import os
from dataclasses import dataclass

import pytest

from broker.errors import JournalError
from broker.journal import writer as journal_writer
from broker.journal.writer import Kind
from tests.journals import DEADLINE_S, begin, contents, files, small


@dataclass
class Disk:
    """A disk with room for ``room`` bytes; creating a file needs ``name`` bytes of room."""

    room: int
    name: int = 0
    code: int = errno.ENOSPC

    def pwrite(self, fd, data, offset):
        if self.room == 0:
            raise OSError(self.code, os.strerror(self.code))
        done = PWRITE(fd, data[: self.room], offset)
        self.room -= done
        return done

    def pwritev(self, fd, parts, offset):
        return self.pwrite(fd, b"".join(parts), offset)

    def open(self, path, flags, *mode):
        if flags & os.O_CREAT and self.room < self.name:
            raise OSError(self.code, os.strerror(self.code))
        return OPEN(path, flags, *mode)


PWRITE, OPEN = os.pwrite, os.open


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(1 << 30)
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.0)
    monkeypatch.setattr(journal_writer.os, "pwrite", disk.pwrite)
    monkeypatch.setattr(journal_writer.os, "pwritev", disk.pwritev)
    monkeypatch.setattr(journal_writer.os, "open", disk.open)
    return disk


@pytest.mark.parametrize("room", [0, 1, 20, 21, 1500, 2999])
def test_what_did_not_fit_is_written_when_there_is_room(tmp_path, disk, room):
    with begin(tmp_path, small(sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"before")
        journal.flush()
        disk.room = room
        places = [journal.append(Kind.SEGMENT, b"%d" % i * 1000) for i in range(3)]
        journal.flush()
        assert journal.durable < 4
        assert journal.blocked.startswith("No space left on device since ")
        assert not journal.wants_snapshot
        assert [journal.read(place) for place in places] == [b"%d" % i * 1000 for i in range(3)]
        journal.append(Kind.EVENT, b"a commit")
        journal.flush()
        assert journal.durable < 4
        disk.room = 1 << 30
        journal.flush()
        assert journal.blocked == ""
        assert journal.durable == journal.sequence == 5
        assert journal.nbytes == sum(files(tmp_path).values())
    assert contents(tmp_path) == [b"before", b"0" * 1000, b"1" * 1000, b"2" * 1000, b"a commit"]


@pytest.mark.parametrize("room", [*range(0, 400, 13), 1 << 30])
def test_a_group_of_more_parts_than_one_call_takes_is_written_once_and_in_order(
    tmp_path, disk, monkeypatch, room
):
    monkeypatch.setattr("broker.journal.writer.MAX_PARTS", 3)
    with begin(tmp_path, small(sync_interval_s=1e6)) as journal:
        disk.room = room
        for i in range(10):
            journal.append(Kind.EVENT, b"%d" % i)
        journal.flush()
        disk.room = 1 << 30
        journal.flush()
        assert journal.durable == 10
    assert contents(tmp_path) == [b"%d" % i for i in range(10)]


def test_room_that_comes_byte_by_byte(tmp_path, disk):
    with begin(tmp_path, small(sync_interval_s=1e6)) as journal:
        disk.room = 0
        for i in range(20):
            journal.append(Kind.EVENT, b"%d" % i)
        while journal.durable < 20:
            disk.room = 1
            journal.flush()
        assert disk.room <= 1
        disk.room = 1 << 30
    assert contents(tmp_path) == [b"%d" % i for i in range(20)]


def test_killed_while_the_disk_is_full_all_that_was_durable_is_there(tmp_path, disk):
    for room in range(0, 200, 7):
        folder = tmp_path / str(room)
        disk.room = 1 << 30
        journal = begin(folder, small(sync_interval_s=1e6)).thing
        journal.append(Kind.EVENT, b"x")
        journal.flush()
        disk.room = room
        journal.append(Kind.EVENT, b"y" * 50)
        journal.flush()
        journal.append(Kind.EVENT, b"z" * 50)
        journal.flush()
        durable = journal.durable
        journal.abandon()
        disk.room = 1 << 30
        found = contents(folder)
        assert found == [b"x", b"y" * 50, b"z" * 50][: len(found)]
        assert len(found) >= durable


def test_a_new_file_that_cannot_be_begun_is_begun_later(tmp_path, disk):
    with begin(tmp_path, small(sync_interval_s=1e6)) as journal:
        disk.room, disk.name = 10, 11
        journal.rotate(b"snapshot")
        place = journal.append(Kind.EVENT, b"e")
        journal.flush()
        assert journal.durable == 0
        assert list(files(tmp_path)) == ["journal-00000001.log"]
        assert journal.read(place) == b"e"
        disk.name = 0
        # The disk has room for a part of the new file's head only.
        journal.flush()
        assert journal.blocked
        disk.room = 1 << 30
        journal.flush()
        assert journal.durable == 2
        assert journal.read(place) == b"e"
    assert contents(tmp_path) == [b"snapshot", b"e"]


def test_in_mode_synced_the_thread_tries_again_by_itself(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.001)
    with begin(tmp_path, small(durability="synced")) as journal:
        assert journal.sync(DEADLINE_S)
        disk.room = 5
        journal.append(Kind.EVENT, b"e")
        assert not journal.sync(0.02)
        assert journal.blocked
        disk.room = 1 << 30
        assert journal.sync(DEADLINE_S)
        assert journal.durable == 1
    assert contents(tmp_path) == [b"e"]


def test_tries_are_spaced(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(journal_writer, "RETRY_S", 1e6)
    with begin(tmp_path, small(sync_interval_s=1e6)) as journal:
        disk.room = 0
        journal.append(Kind.EVENT, b"e")
        journal.flush()
        disk.room = 1 << 30
        journal.flush()
        assert journal.durable == 0
    # Closing does not wait.
    assert contents(tmp_path) == [b"e"]


def test_closing_on_a_full_disk_says_what_is_not_safe(tmp_path, disk, caplog):
    journal = begin(tmp_path, small(sync_interval_s=1e6))
    disk.room = 30
    journal.thing.append(Kind.EVENT, b"e" * 50)
    journal.close()
    assert "1 records are not safe: No space left on device" in caplog.text
    disk.room = 1 << 30
    assert contents(tmp_path) == []


def test_a_journal_that_cannot_be_begun_is_refused(tmp_path, disk):
    disk.room = 3
    with pytest.raises(JournalError, match=r"No space left on device.*make room"):
        begin(tmp_path / "a")
    disk.room = 1 << 30
    assert contents(tmp_path / "a") == []


def test_other_faults_of_writing_wait_too(tmp_path, disk):
    with begin(tmp_path, small(sync_interval_s=1e6)) as journal:
        disk.room, disk.code = 0, errno.EDQUOT
        journal.append(Kind.EVENT, b"e")
        journal.flush()
        assert "quota" in journal.blocked
        disk.room = 1 << 30
    assert contents(tmp_path) == [b"e"]
