"""Two files say how far a journal goes, so neither a deletion nor a cut behind a kill is silent loss."""

import base64
import errno
import json
import os
from pathlib import Path

import pytest

from broker.errors import JournalError
from broker.journal import claim
from broker.journal.claim import LOCK, MARK_BYTES, SECOND, Mark, read_known, read_mark
from broker.journal.opening import records, survey
from broker.journal.writer import Kind, file_name
from tests.broker_driver import Driver
from tests.journals import (
    DEADLINE_S,
    begin,
    change,
    contents,
    of_an_earlier_version,
    small,
    start_machine_anew,
    three_files,
)

WRITTEN_BEFORE = Path(__file__).with_name("written_before_second_mark.json")
LAG = small(sync_interval_s=1e6)
"""The disk gets the head of the first file, and nothing else until a sync that a test asks for."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


@pytest.fixture(autouse=True)
def boot(tmp_path, monkeypatch):
    """Give the machine an id of its boot, also on a system that has none."""
    (tmp_path / "boot_id").write_text("d37e287c-c130-4c64-82f6-1d9498bd757e\n")
    monkeypatch.setattr(claim, "BOOT_ID", tmp_path / "boot_id")


def killed(folder, config=LAG):
    """Leave the journal of a broker that was killed before the second sync: two files, confirmed to the end."""
    with begin(folder, config) as journal:
        journal.append(Kind.EVENT, b"one")
        journal.append(Kind.EVENT, b"two")
        journal.rotate(b"snapshot")
        journal.append(Kind.EVENT, b"three")
        journal.flush()
        journal.abandon()
    assert read_mark(folder) == Mark(1, 39)


@pytest.mark.parametrize("gone", [LOCK, "lock.2", ""])
@pytest.mark.parametrize("make", [three_files, killed])
def test_a_mark_deleted_together_with_the_newest_file_is_noticed(folder, make, gone):
    make(folder)
    newest = max(folder.glob("journal-*.log"))
    newest.unlink()
    (folder / gone).unlink() if gone else None
    with pytest.raises(JournalError, match=f"{newest.name}, byte 0: missing, the newest"):
        begin(folder)
    *_, loss = records(folder)
    assert loss.what.startswith("missing, the newest")


def test_a_newest_file_that_was_cut_after_a_kill_is_told_from_one_that_was_never_longer(folder):
    killed(folder)
    size = (folder / file_name(2)).stat().st_size
    assert survey(folder).losses == []
    for at in range(size):
        before = change(folder, 2, at, to="cut")
        here = survey(folder)
        assert [loss.file for loss in here.losses] == [2]
        assert (here.torn, here.unbegun) == (None, [])
        (folder / file_name(2)).write_bytes(before)
    change(folder, 2, size - 1, to="cut")
    with pytest.raises(JournalError, match=f"{size - 1} bytes, at least {size} were written"):
        begin(folder)
    with begin(folder, accept_loss=True) as journal:
        assert [record.payload for record in journal.recovered()] == [b"snapshot"]


def test_junk_behind_an_older_file_is_damage_after_a_kill(folder):
    killed(folder)
    with open(folder / file_name(1), "ab") as file:
        file.write(b"junk")
    with pytest.raises(JournalError, match=file_name(1)):
        begin(folder)
    # After a power failure the same bytes may be what the disk made of a write.
    start_machine_anew(folder)
    assert contents(folder) == [b"one", b"two"]


def test_after_a_start_of_the_machine_only_the_disk_is_a_witness(folder):
    killed(folder)
    start_machine_anew(folder)
    assert read_known(folder) == read_mark(folder)
    change(folder, 2, 60, to="cut")
    assert contents(folder) == [b"one", b"two"]


@pytest.mark.parametrize("left", [0, 1, 30, 52])
def test_a_write_that_a_kill_cut_short_is_a_torn_end(folder, monkeypatch, left):
    """The operating system had a part of a group of records, and nobody was told of any of them."""
    with begin(folder, LAG) as journal:
        journal.append(Kind.EVENT, b"confirmed")
        journal.flush()
        confirmed = journal.nbytes

        def pwritev(fd, parts, offset):
            os.pwrite(fd, b"".join(parts)[:left], offset)
            raise OSError(5, "killed here")

        monkeypatch.setattr(os, "pwritev", pwritev)
        journal.append(Kind.EVENT, b"never confirmed, because it is not whole")
        journal.flush()
        journal.abandon()
    monkeypatch.undo()
    assert (folder / file_name(1)).stat().st_size == confirmed + left
    assert contents(folder) == [b"confirmed"]


def test_with_synced_nothing_is_promised_that_the_disk_does_not_have(folder):
    with begin(folder, small(sync_interval_s=1e6, durability="synced")) as journal:
        journal.append(Kind.EVENT, b"on the disk")
        assert journal.sync(DEADLINE_S)
        synced = journal.nbytes
        journal.abandon()
    assert read_known(folder) == Mark(1, synced)
    assert [(folder / name).stat().st_size for name in (LOCK, SECOND)] == [MARK_BYTES] * 2


def test_without_the_id_of_the_boot_nothing_is_said_of_writes(folder, monkeypatch):
    monkeypatch.setattr(claim, "BOOT_ID", folder / "no such file")
    killed(folder)
    assert read_known(folder) == Mark(1, 39)
    change(folder, 2, 60, to="cut")
    assert contents(folder) == [b"one", b"two"]


@pytest.mark.parametrize("junk", [b"", b"junk", b"\xff" * 200, b"9" * 5000, bytes(35)])
def test_a_second_mark_that_is_unreadable_says_nothing_and_is_written_again(folder, junk):
    killed(folder)
    (folder / LOCK).unlink()
    (folder / SECOND).write_bytes(junk)
    assert read_known(folder) == Mark()
    assert contents(folder) == [b"snapshot", b"three"]
    with begin(folder, LAG) as journal:
        journal.append(Kind.EVENT, b"four")
        journal.flush()
        assert read_known(folder) == Mark(2, (folder / file_name(2)).stat().st_size)


def test_a_second_mark_that_is_removed_is_made_again(folder, caplog):
    with begin(folder, LAG) as journal:
        (folder / SECOND).unlink()
        journal.append(Kind.EVENT, b"one")
        assert journal.sync(DEADLINE_S)
        assert read_mark(folder).nbytes == journal.nbytes
        (folder / LOCK).unlink()
        assert read_mark(folder).nbytes == journal.nbytes
    assert f"{folder / SECOND} was removed while the broker used it" in caplog.text


def test_a_journal_that_was_written_before_there_was_a_second_mark_is_read_and_gets_one(folder):
    """The files are those of a killed broker of the version before, which wrote no `lock.2`."""
    folder.mkdir()
    for name, content in json.loads(WRITTEN_BEFORE.read_text()).items():
        (folder / name).write_bytes(base64.b64decode(content))
    assert not (folder / SECOND).exists()
    assert read_known(folder) == Mark(2, 3139)
    driver = Driver(folder=folder, heartbeat_s=1.0, task_lease_s=1000.0)
    state = driver.dispatcher.state
    assert (state.steps.committed, state.steps.released, state.published.version) == (2, 1, 3)
    assert [unit.unit_id for unit in state.deliveries.units()] == ["ev.0"]
    assert state.tasks.leased == 4
    assert {name: len(found.segments) for name, found in state.assembly.trajectories.items()} == {"g.0.0": 1}
    assert driver.balanced()
    assert driver.kill_broker() > 0
    assert read_known(folder).bytes_of(2) == (folder / file_name(2)).stat().st_size
    # An earlier version reads the first file alone, and finds there what it always has.
    of_an_earlier_version(folder)
    assert read_mark(folder).file == 2


def test_a_journal_without_a_second_mark_opens_on_a_full_disk_and_gets_it_when_there_is_room(
    folder, monkeypatch
):
    folder.mkdir()
    (folder / LOCK).write_bytes(claim.pack_mark(Mark(1, 5)))
    real = os.open

    def full(path, *arguments, **settings):
        if Path(path).name == SECOND:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        claimed = claim.Claim(folder)
        claimed.mark_written(Mark(1, 9))
        claimed.mark_synced(Mark(1, 9), sync=True)
    assert read_known(folder) == Mark(1, 9)
    claimed.mark_synced(Mark(1, 12), sync=True)
    claimed.close()
    (folder / LOCK).unlink()
    assert read_mark(folder) == Mark(1, 12)
