"""Small journals for tests, and functions that read them."""

from contextlib import closing

from broker.config import JournalConfig
from broker.journal.claim import LOCK, MARK_BYTES, SECOND, Mark, pack_mark, pack_written
from broker.journal.files import numbers
from broker.journal.journal import Journal
from broker.journal.writer import Kind, file_name, pack_segment

DEADLINE_S = 120.0
LAST = b"".join(pack_segment(b"header", b"last" * 4))
WHOLE = [b"snapshot 2", b"before", LAST]
"""Payloads from the newest snapshot on in the journal of `three_files`."""


class Closing(closing):
    """A journal that a `with` block closes; `close` closes it without a block."""

    def close(self):
        self.thing.close()


def small(**settings):
    return JournalConfig(**{"sync_interval_s": 0.05, "min_free_bytes": 0, **settings})


def begin(folder, config=None, **settings):
    """Open the journal of run "run" in ``folder``."""
    return Closing(Journal.open(folder, run="run", config=config or small(), **settings))


def contents(folder, **settings):
    """Return the payloads that a recovery reads."""
    with begin(folder, **settings) as journal:
        return [record.payload for record in journal.recovered()]


def files(folder):
    """Return the size in bytes of each file of the journal."""
    return {path.name: path.stat().st_size for path in folder.glob("journal-*.log")}


def three_files(folder):
    """Make a journal of three files; the last holds a snapshot, an event and a segment. Return the folder."""
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


def change(folder, number, at, *, to=None):
    """Flip one bit of a file's byte, or cut the file there. Return the file's bytes from before."""
    path = folder / file_name(number)
    before = path.read_bytes()
    if to == "cut":
        path.write_bytes(before[:at])
    else:
        path.write_bytes(before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :])
    return before


def of_an_earlier_version(folder, lock=None):
    """Leave of the marks what earlier versions wrote: a ``lock`` of one line, or of the given bytes."""
    (folder / SECOND).unlink()
    (folder / LOCK).write_bytes((folder / LOCK).read_bytes()[:MARK_BYTES] if lock is None else lock)


def start_machine_anew(folder):
    """Make the marks those of an earlier start of the machine, as after a power failure."""
    for name in (LOCK, SECOND):
        content = (folder / name).read_bytes()
        line = content[MARK_BYTES:].split()
        written = pack_written(Mark(int(line[0]), int(line[1])), b"an-earlier-boot") if line else b""
        (folder / name).write_bytes(content[:MARK_BYTES] + written)


def unsynced(folder, nbytes):
    """Mark the last ``nbytes`` of the newest file as not on the disk, as after a power failure between two syncs."""
    newest = numbers(folder)[-1]
    size = (folder / file_name(newest)).stat().st_size
    start_machine_anew(folder)
    for name in (LOCK, SECOND):
        with open(folder / name, "r+b") as file:
            file.write(pack_mark(Mark(newest, size - nbytes)))
