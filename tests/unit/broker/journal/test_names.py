"""After a power failure no file seems to be missing, also if the disk keeps names in any order.

A file system need not keep renames and deletions in their order. It keeps those before a sync of the folder;
of the later ones it may keep any, and leave out any.
"""

import os
from itertools import chain, combinations
from pathlib import Path

import pytest

from broker.journal.claim import LOCK
from broker.journal.files import numbers
from broker.journal.opening import ACCEPTED, accept_losses, survey
from broker.journal.writer import Kind, file_name
from tests.journals import DEADLINE_S, begin, contents, small


class Disk:
    """Names of a folder as the disk has them, and what was done to names since they were synced."""

    def __init__(self, folder, elsewhere, monkeypatch):
        self.folder, self.elsewhere, self.looked = folder, elsewhere, 0
        self.synced_folders = []
        self.original = {name: getattr(os, name) for name in ("rename", "unlink", "truncate", "fsync")}
        self.synced()
        for name in self.original:
            monkeypatch.setattr(os, name, getattr(self, name))

    def synced(self):
        self.names = {path.name: path.stat().st_ino for path in self.folder.iterdir()}
        self.data = {path.stat().st_ino: path.read_bytes() for path in self.folder.iterdir()}
        self.cut, self.done = set(), []

    def rename(self, old, new):
        self.original["rename"](old, new)
        self._note("rename", Path(old).name, Path(new).name)

    def unlink(self, path):
        self.original["unlink"](path)
        self._note("unlink", Path(path).name, "")

    def truncate(self, path, nbytes):
        inode = os.stat(path).st_ino
        self.original["truncate"](path, nbytes)
        self.cut.add(inode)
        self._note("truncate", inode, nbytes)

    def fsync(self, fd):
        self.original["fsync"](fd)
        here = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.synced_folders.append(here)
        if here == self.folder:
            self.synced()

    def _note(self, *what):
        self.done.append(what)
        for kept in chain.from_iterable(combinations(self.done, n) for n in range(len(self.done) + 1)):
            self._look(kept)

    def _look(self, kept):
        """Read the journal as it is after a power failure of which these changes survived."""
        for path in self.folder.iterdir():
            inode = path.stat().st_ino
            if inode not in self.cut and inode in self.data:
                self.data[inode] = path.read_bytes()
        names, data = dict(self.names), dict(self.data)
        for what, one, two in kept:
            if what == "truncate":
                data[one] = data[one][:two]
            elif one in names:
                inode = names.pop(one)
                names |= {two: inode} if what == "rename" else {}
        self.looked += 1
        copy = self.elsewhere / str(self.looked)
        copy.mkdir()
        for name, inode in names.items():
            (copy / name).write_bytes(data[inode])
        assert survey(copy).losses == [], (sorted(names), kept)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


@pytest.mark.parametrize(
    "needed", [[set()], [{2}, set()], [{1, 4}, {4}, set()], [{3}, {3}, {3}, set()]], ids=repr
)
def test_a_power_failure_while_files_are_deleted_costs_no_file(folder, tmp_path, monkeypatch, needed):
    (tmp_path / "failures").mkdir()
    with begin(folder, small(keep_bytes=0, sync_interval_s=1e6)) as journal:
        disk = Disk(folder, tmp_path / "failures", monkeypatch)
        for step, files in enumerate(needed):
            for i in range(4):
                journal.append(Kind.SEGMENT, b"%d" % i * 100)
                journal.rotate(b"snapshot %d.%d" % (step, i))
            assert journal.sync(DEADLINE_S)
            journal.retain(files)
        assert disk.looked > 20
        newest = 4 * len(needed) + 1
        assert numbers(folder) == [newest]
        monkeypatch.undo()
    assert contents(folder) == [b"snapshot %d.3" % (len(needed) - 1)]


def test_a_power_failure_while_a_deletion_is_finished_costs_no_file(folder, tmp_path, monkeypatch):
    (tmp_path / "failures").mkdir()
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        for i in range(3):
            journal.append(Kind.SEGMENT, b"s" * 100)
            journal.rotate(b"snapshot %d" % i)
    disk = Disk(folder, tmp_path / "failures", monkeypatch)
    # The process was killed after the rename, which the disk need not have.
    os.rename(folder / file_name(1), folder / "journal-00000001.released")
    assert contents(folder) == [b"snapshot 2"]
    assert (folder / "journal-00000001.released").stat().st_size == 0
    assert disk.looked > 3


def test_many_deleted_files_are_forgotten_a_few_at_a_time(folder):
    with begin(folder, small(keep_bytes=0, sync_interval_s=1e6)) as journal:
        for i in range(40):
            journal.append(Kind.SEGMENT, b"s" * 100)
            journal.rotate(b"snapshot %d" % i)
        assert journal.sync(DEADLINE_S)
        left = []
        for _ in range(8):
            journal.retain([])
            left.append(len(numbers(folder, ".released")))
        assert numbers(folder) == [41]
        assert left[0] > left[1] > left[-1] == 1


# --- names beside the files -----------------------------------------------------------------------------------


def test_the_journals_own_name_is_on_the_disk_before_anything_is_in_it(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "one" / "journal"
    synced, original = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), original(fd))
    )
    begin(folder).close()
    assert synced[:3] == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "one"]
    assert folder in synced
    # A process that made the folder may have been killed before it synced the name.
    synced.clear()
    begin(folder).close()
    assert folder.parent in synced


def test_accepted_losses_are_on_the_disk_before_they_have_their_name(folder, monkeypatch):
    with begin(folder) as journal:
        journal.rotate(b"snapshot")
    (folder / file_name(1)).unlink()
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    assert len(accept_losses(folder)) == 1
    where = done.index("replace")
    assert done[where - 1].startswith(ACCEPTED)
    assert done[where + 1] == folder.name


def test_a_lock_that_was_made_again_has_its_name_on_the_disk(folder, monkeypatch):
    with begin(folder, small(sync_interval_s=1e6)) as journal:
        (folder / LOCK).unlink()
        synced, original = [], os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), original(fd))
        )
        journal.append(Kind.EVENT, b"e")
        assert journal.sync(DEADLINE_S)
        assert folder in synced
