"""Only the torn end that a killed writer leaves is cut: all other damage is refused, with its place."""

import os
import shutil

import msgspec
import pytest

from broker.errors import JournalError
from broker.journal.files import each_file, numbers
from broker.journal.mark import LOCK, Mark, pack_mark, read_mark
from broker.journal.opening import accept_losses
from broker.journal.records import HEAD_BYTES, Kind, file_name, pack_segment, record_at
from broker.journal.survey import records, survey
from tests.journals import DEADLINE_S, begin, contents, small


@pytest.fixture
def folder(tmp_path):
    """Return a journal of three files; the last holds a snapshot, an event and a segment."""
    folder = tmp_path / "journal"
    with begin(folder, small()) as journal:
        journal.append(Kind.EVENT, b"first")
        journal.append(Kind.SEGMENT, *pack_segment(b"header", b"body" * 4))
        journal.rotate(b"snapshot 1")
        journal.append(Kind.SEGMENT, *pack_segment(b"header", b"more" * 4))
        journal.append(Kind.EVENT, b"event")
        journal.rotate(b"snapshot 2")
        journal.append(Kind.EVENT, b"before")
        journal.append(Kind.SEGMENT, *pack_segment(b"header", b"last" * 4))
        assert journal.sync(DEADLINE_S)
    return folder


LAST = b"".join(pack_segment(b"header", b"last" * 4))
WHOLE = [b"snapshot 2", b"before", LAST]


def change(folder, number, at, *, to=None):
    """Flip one bit of a file's byte, or cut the file there. Return the file's bytes from before."""
    path = folder / file_name(number)
    before = path.read_bytes()
    if to == "cut":
        path.write_bytes(before[:at])
    else:
        path.write_bytes(before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :])
    return before


def unsynced(folder, nbytes):
    """Mark the last ``nbytes`` of the newest file as not yet on the disk, as after a kill between two syncs."""
    newest = numbers(folder)[-1]
    size = (folder / file_name(newest)).stat().st_size
    (folder / LOCK).write_bytes(pack_mark(Mark(newest, size - nbytes)))


def test_a_cut_at_any_byte_of_the_last_record_costs_that_record_alone(folder, tmp_path):
    size = (folder / file_name(3)).stat().st_size
    unsynced(folder, HEAD_BYTES + len(LAST))
    for lost in range(1, HEAD_BYTES + len(LAST) + 1):
        copy = shutil.copytree(folder, tmp_path / str(lost))
        change(copy, 3, size - lost, to="cut")
        with begin(copy) as journal:
            assert [record.payload for record in journal.recovered()] == WHOLE[:2]
            journal.append(Kind.EVENT, b"goes on")
        assert contents(copy) == [*WHOLE[:2], b"goes on"]


def test_a_cut_in_the_first_record_of_a_file_goes_back_to_the_snapshot_before(tmp_path):
    with begin(tmp_path / "original", small(sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"a")
        assert journal.sync(DEADLINE_S)
        journal.rotate(b"snapshot")
        size = (tmp_path / "original" / file_name(2)).stat().st_size
        journal.abandon()
    for at in range(size):
        copy = shutil.copytree(tmp_path / "original", tmp_path / str(at))
        change(copy, 2, at, to="cut")
        assert contents(copy) == [b"a"]
        with begin(copy) as journal:
            journal.append(Kind.EVENT, b"b")
            journal.rotate(b"again")
        assert contents(copy) == [b"again"]


def test_a_torn_end_is_reported_with_its_bytes(folder, caplog):
    size = (folder / file_name(3)).stat().st_size
    unsynced(folder, HEAD_BYTES + len(LAST))
    change(folder, 3, size - 5, to="cut")
    assert contents(folder) == WHOLE[:2]
    assert f"({1} records, {HEAD_BYTES + len(LAST) - 5} bytes)" in caplog.text


def test_no_flipped_bit_goes_unnoticed(folder, tmp_path):
    """Damage is refused, except in an unsynced last record, where it is a torn end; nothing wrong is read."""
    last = (folder / file_name(3)).stat().st_size - HEAD_BYTES - len(LAST)
    unsynced(folder, HEAD_BYTES + len(LAST))
    for number in numbers(folder):
        for at in range((folder / file_name(number)).stat().st_size):
            before = change(folder, number, at)
            try:
                found = survey(folder)
            except JournalError as error:
                # Only a foreign format version raises this, and the checksum, checked first, must fail here.
                pytest.fail(f"{number}, {at}: {error}")
            if (number, at) >= (3, last):
                assert found.torn is not None
                assert found.torn.offset == last
                assert not found.losses
            else:
                assert [loss.file for loss in found.losses] == [number]
                assert found.torn is None
            payloads = {c.record(entry).payload for c in each_file(folder) for entry in c.entries}
            assert len(payloads) in (7, 8)
            assert payloads <= {*WHOLE, b"first", b"event", b"snapshot 1"} | {
                b"".join(pack_segment(b"header", body * 4)) for body in (b"body", b"more")
            }
            (folder / file_name(number)).write_bytes(before)


def test_a_record_with_a_flipped_bit_is_not_read(folder):
    with begin(folder) as journal:
        place = list(journal.recovered())[-1].place
        for at in range(place.offset - HEAD_BYTES, place.offset + place.nbytes):
            before = change(folder, 3, at)
            with pytest.raises(JournalError, match=f"{file_name(3)}, byte {place.offset - HEAD_BYTES}"):
                journal.read(place)
            (folder / file_name(3)).write_bytes(before)
        assert journal.read(place) == LAST


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda f: change(f, 1, 60), "journal-00000001.log, byte .*checksum does not match .1 records"),
        (lambda f: change(f, 1, 2), "journal-00000001.log, byte 0: a head that is cut or damaged"),
        (
            lambda f: change(f, 2, 100, to="cut"),
            r"journal-00000002.log, byte 70: .*cut \(2 records, 73 bytes\)",
        ),
        (lambda f: change(f, 1, 0, to="cut"), "journal-00000001.log, byte 0"),
        (
            lambda f: (f / file_name(2)).unlink(),
            r"journal-00000002.log, byte 0: missing \(3 records, 1.. bytes\)",
        ),
        (lambda f: (f / file_name(1)).unlink(), "journal-00000001.log, byte 0: missing; how many"),
        (lambda f: (f / file_name(3)).unlink(), "journal-00000003.log, byte 0: missing, the newest"),
        (lambda f: change(f, 3, 10), "journal-00000003.log, byte 0: a head"),
        (lambda f: change(f, 3, 20, to="cut"), "journal-00000003.log, byte 0: a head"),
        (lambda f: change(f, 3, 60), "journal-00000003.log, byte 39: a record whose checksum"),
    ],
)
@pytest.mark.parametrize("by_command", [False, True])
def test_damage_is_refused_with_its_place_and_can_be_accepted(folder, harm, text, by_command):
    harm(folder)
    for _ in range(2):
        with pytest.raises(JournalError, match=text) as refused:
            begin(folder)
        assert f"offbeat journal accept-loss {folder.parent}" in str(refused.value)
    if by_command:
        assert len(accept_losses(folder)) == 1
        assert accept_losses(folder) == []
    with begin(folder, accept_loss=not by_command) as journal:
        assert len(journal.losses) == 1
        kept = [record.payload for record in journal.recovered()]
        assert set(kept) <= {*WHOLE, b"first", b"event", b"snapshot 1", kept[1]}
        place = journal.append(Kind.EVENT, b"goes on")
        assert journal.holds(place)
        assert place.file == (3 if text.startswith(("journal-00000001", "journal-00000002")) else 4)
    # The loss stays accepted: nobody is asked again.
    assert contents(folder) == [*kept, b"goes on"]
    with begin(folder) as journal:
        journal.rotate(b"new")
    assert contents(folder) == [b"new"]


# --- the newest file ------------------------------------------------------------------------------------------


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
        (folder / LOCK).write_bytes(lock)
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
    (folder / LOCK).write_bytes(lock)
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


def test_accepting_once_does_not_accept_what_comes_later(folder):
    change(folder, 1, 60)
    begin(folder, accept_loss=True).close()
    change(folder, 2, 60)
    with pytest.raises(JournalError, match=r"journal-00000002.*1 records|1 records.*journal-00000002"):
        begin(folder)


def test_a_file_cut_at_the_end_of_a_record_is_noticed(folder):
    data = (folder / file_name(2)).read_bytes()
    change(folder, 2, len(data) - HEAD_BYTES - len(b"event"), to="cut")
    with pytest.raises(JournalError, match=r"journal-00000002.*were written \(1 records, 26 bytes\)"):
        begin(folder)


def test_a_record_put_in_twice_is_noticed(folder):
    path = folder / file_name(3)
    data = path.read_bytes()
    first = data.index(b"\xf5OBr")
    end = record_at(data, first)[2]
    path.write_bytes(data[:end] + data[first:end] + data[end:])
    with pytest.raises(JournalError, match="out of order"):
        begin(folder)


def test_a_power_failure_takes_only_what_the_disk_did_not_have_yet(tmp_path):
    """A file's end is gone and the next file has a snapshot, but neither was reported as on the disk."""
    folder = tmp_path / "journal"
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        journal.append(Kind.EVENT, b"on the disk")
        assert journal.sync(DEADLINE_S)
        journal.append(Kind.EVENT, b"gone")
        journal.rotate(b"snapshot")
        journal.abandon()
    size = (folder / file_name(1)).stat().st_size
    change(folder, 1, size - 2, to="cut")
    assert contents(folder) == [b"on the disk"]
    assert numbers(folder) == [1]
    with begin(folder) as journal:
        journal.append(Kind.EVENT, b"goes on")
    assert contents(folder) == [b"on the disk", b"goes on"]


def test_accepted_losses_that_cannot_be_read_are_named(folder):
    (folder / "accepted-losses.json").write_text("[1")
    with pytest.raises(JournalError, match="remove the file to be asked again"):
        begin(folder)
    (folder / "accepted-losses.json").write_bytes(msgspec.json.encode([]))
    begin(folder).close()
