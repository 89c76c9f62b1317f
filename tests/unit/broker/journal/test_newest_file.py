"""What the disk is known to have of the newest file cannot be lost unnoticed, and a repair removes no byte."""

import os

import pytest

from broker.errors import JournalError
from broker.journal.claim import Mark, read_mark
from broker.journal.files import numbers
from broker.journal.opening import records, survey
from broker.journal.writer import HEAD_BYTES, Kind, file_name
from tests.journals import (
    DEADLINE_S,
    LAST,
    WHOLE,
    begin,
    change,
    contents,
    of_an_earlier_version,
    small,
    start_machine_anew,
    three_files,
)


@pytest.fixture
def folder(tmp_path):
    return three_files(tmp_path / "journal")


def test_no_byte_that_the_disk_had_can_be_cut_off_or_changed_unnoticed(folder):
    """The mark says how far the disk had the newest file, so its end is no torn end."""
    size = (folder / file_name(3)).stat().st_size
    assert read_mark(folder) == Mark(3, size)
    for at in range(size):
        for to in ("cut", None):
            before = change(folder, 3, at, to=to)
            here = survey(folder)
            assert [loss.file for loss in here.losses] == [3]
            assert (here.torn, here.unbegun) == (None, [])
            (folder / file_name(3)).write_bytes(before)
    assert survey(folder).losses == []


def test_a_newest_file_cut_between_two_records_is_refused_with_its_name(folder):
    size = (folder / file_name(3)).stat().st_size
    cut = size - HEAD_BYTES - len(LAST)
    change(folder, 3, cut, to="cut")
    with pytest.raises(
        JournalError, match=f"{file_name(3)}, byte {cut}: {cut} bytes, at least {size} were written"
    ):
        begin(folder)
    with begin(folder, accept_loss=True) as journal:
        assert [record.payload for record in journal.recovered()] == WHOLE[:2]
        assert journal.append(Kind.EVENT, b"goes on").file == 4
    assert contents(folder) == [*WHOLE[:2], b"goes on"]


@pytest.mark.parametrize("lock", [None, b"00000001\n"])
def test_the_only_file_of_a_journal_cannot_vanish_unnoticed(tmp_path, lock):
    folder = tmp_path / "journal"
    with begin(folder) as journal:
        journal.append(Kind.EVENT, b"one")
    size = (folder / file_name(1)).stat().st_size
    if lock is not None:
        of_an_earlier_version(folder, lock)
    (folder / file_name(1)).unlink()
    with pytest.raises(
        JournalError, match=rf"{file_name(1)}, byte 0: missing, the newest.*\D{0 if lock else size} bytes"
    ):
        begin(folder)
    assert numbers(folder) == []
    with begin(folder, accept_loss=True) as journal:
        assert journal.append(Kind.EVENT, b"two").file == 2
    assert contents(folder) == [b"two"]


def test_who_reads_all_records_is_told_of_a_newest_file_that_is_short_or_missing(folder):
    change(folder, 3, (folder / file_name(3)).stat().st_size - HEAD_BYTES - len(LAST), to="cut")
    *_, loss = records(folder)
    assert (loss.file, loss.torn) == (3, False)
    change(folder, 3, (folder / file_name(3)).stat().st_size - 2, to="cut")
    *_, loss = records(folder)
    assert (loss.file, loss.torn) == (3, False)
    (folder / file_name(3)).unlink()
    *_, loss = records(folder)
    assert (loss.file, loss.torn, loss.what[:7]) == (3, False, "missing")


def test_what_was_not_yet_on_the_disk_may_be_cut_off(tmp_path):
    folder = tmp_path / "journal"
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"on the disk")
        assert journal.sync(DEADLINE_S)
        synced = journal.nbytes
        journal.append(Kind.EVENT, b"gone")
        journal.flush()
        assert read_mark(folder) == Mark(1, synced)
        journal.abandon()
    start_machine_anew(folder)
    for at in range((folder / file_name(1)).stat().st_size - 1, synced - 1, -1):
        change(folder, 1, at, to="cut")
        here = survey(folder)
        assert here.losses == []
        assert (here.torn is None) == (at == synced)
    assert contents(folder) == [b"on the disk"]


def test_a_cut_file_before_one_that_was_not_begun_is_noticed(tmp_path):
    folder = tmp_path / "journal"
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"kept")
        journal.flush()
        kept = journal.nbytes
        journal.append(Kind.EVENT, b"gone")
        assert journal.sync(DEADLINE_S)
        journal.abandon()
    change(folder, 1, kept, to="cut")
    (folder / file_name(2)).touch()
    with pytest.raises(JournalError, match=f"{file_name(1)}, byte {kept}: {kept} bytes, .* were written"):
        begin(folder)


def test_a_torn_file_before_a_deleted_one_is_damage(folder):
    change(folder, 1, (folder / file_name(1)).stat().st_size - 1, to="cut")
    (folder / file_name(2)).rename(folder / "journal-00000002.released")
    with pytest.raises(JournalError, match=f"{file_name(1)}, byte .* a record that is cut"):
        begin(folder)


def lagging(folder):
    """Write three files of which the disk is known to have the first record only."""
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"on the disk")
        assert journal.sync(DEADLINE_S)
        journal.append(Kind.EVENT, b"confirmed")
        journal.rotate(b"snapshot 1")
        journal.append(Kind.EVENT, b"confirmed, too")
        journal.rotate(b"snapshot 2")
        journal.abandon()
    start_machine_anew(folder)


def test_a_repair_removes_no_byte(tmp_path, caplog):
    """A flipped bit in the unsynced end of a file looks like a power failure, but the files behind it are good."""
    folder = tmp_path / "journal"
    lagging(folder)
    before = {number: (folder / file_name(number)).read_bytes() for number in (1, 2, 3)}
    change(folder, 1, len(before[1]) - 2)
    damaged = (folder / file_name(1)).read_bytes()
    assert contents(folder) == [b"on the disk"]
    aside = {n: (folder / f"journal-{n:08d}.damaged") for n in (1, 2, 3)}
    assert [aside[n].read_bytes() for n in (2, 3)] == [before[2], before[3]]
    assert (folder / file_name(1)).read_bytes() + aside[1].read_bytes() == damaged
    for path in aside.values():
        assert path.name in caplog.text
    assert numbers(folder) == [1]
    assert contents(folder) == [b"on the disk"]
    # Restored by hand, the records are read again.
    for n in (1, 2, 3):
        (folder / file_name(n)).write_bytes(before[n])
    assert contents(folder) == [b"snapshot 2"]


def test_a_second_repair_does_not_replace_what_the_first_one_kept(tmp_path):
    folder = tmp_path / "journal"
    for content in (b"first", b"second", b"third"):
        begin(folder).close()
        (folder / file_name(2)).write_bytes(content)
    begin(folder).close()
    kept = {path.name: path.read_bytes() for path in folder.glob("*.damaged")}
    assert kept == {
        "journal-00000002.damaged": b"first",
        "journal-00000002-2.damaged": b"second",
        "journal-00000002-3.damaged": b"third",
    }


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_repair_that_is_interrupted_is_finished(tmp_path, monkeypatch, steps):
    folder = tmp_path / "journal"
    lagging(folder)
    change(folder, 1, (folder / file_name(1)).stat().st_size - 2)
    left, original = iter(range(steps)), os.fsync

    def sync(fd):
        if next(left, None) is None:
            raise KeyboardInterrupt
        original(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(KeyboardInterrupt):
        begin(folder)
    monkeypatch.undo()
    assert contents(folder) == [b"on the disk"]


@pytest.mark.parametrize(
    "lock",
    [
        b"00000003\n",
        b"00000003\n0000000000000084 87ab50b8\n",
        b"",
        b"00000003 0000000000000999 00000000\n",
        b"junk",
    ],
)
def test_a_lock_of_an_earlier_version_or_one_that_is_unreadable_says_nothing_of_bytes(folder, lock):
    of_an_earlier_version(folder, lock)
    change(folder, 3, (folder / file_name(3)).stat().st_size - HEAD_BYTES - len(LAST), to="cut")
    assert contents(folder) == WHOLE[:2]
    # From now on the mark names the byte, too.
    assert read_mark(folder) == Mark(3, (folder / file_name(3)).stat().st_size)


def test_a_mark_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    with begin(tmp_path) as journal:
        original = os.pwrite

        def fails(fd, data, offset):
            raise OSError(5, "Input/output error")

        # Only the mark is written with pwrite; records are written with pwritev.
        monkeypatch.setattr(os, "pwrite", fails)
        for _ in range(3):
            journal.append(Kind.EVENT, b"x")
            assert journal.sync(DEADLINE_S)
        assert caplog.text.count("the mark is not written: Input/output error") == 1
        monkeypatch.setattr(os, "pwrite", original)
        journal.append(Kind.EVENT, b"x")
        assert journal.sync(DEADLINE_S)
        assert read_mark(tmp_path).nbytes == journal.nbytes
