"""The broker's write-ahead journal: records in files, safe before any peer hears of what they say.

`append` buffers a record, `flush` has it written, and `durable` says up to which record the journal is safe.
A record is safe when the operating system has it ("written"), or when the disk has it ("synced"). After a
file has grown large, the journal goes on in a new one, which begins with a snapshot. Files that nothing needs
any more are kept as a flight record while there is room for them. docs/understand/journal.md has the format,
and says what survives which failure.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from broker.config import JournalConfig
from broker.errors import JournalError
from broker.journal.claim import Claim
from broker.journal.files import Readers, read_file
from broker.journal.opening import (
    Survey,
    accept,
    check,
    finish_release,
    forget_released,
    release,
    repair,
    survey,
)
from broker.journal.writer import (
    HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Header,
    Kind,
    Loss,
    Place,
    Record,
    Writer,
    file_name,
    pack_header,
    payload_at,
    record_head,
)
from protocol.codec import Buffer

log = logging.getLogger(__name__)

SPACE_S = 0.2


class Space:
    """Looks at the disk at most every `SPACE_S` seconds.

    Args:
        nbytes: returns the bytes of the journal, those that are not written yet included.
    """

    def __init__(self, folder: Path, config: JournalConfig, nbytes: Callable[[], int]) -> None:
        self._folder, self._config, self._nbytes = folder, config, nbytes
        self._looked_at = float("-inf")
        self.why_low = ""
        """Result of the last look of `is_low`: which room is short, in bytes; "" if none is."""

    def is_low(self) -> bool:
        """Return whether the disk is nearly full, or the journal is too large."""
        now = time.monotonic()
        if now - self._looked_at >= SPACE_S:
            self._looked_at = now
            try:
                space = os.statvfs(self._folder)
                free = space.f_bavail * space.f_frsize
            except OSError as error:
                log.warning("journal: %s: %s", self._folder, error.strerror)
                free = 0
            self.why_low = self._config.why_low(free, self._nbytes())
        return bool(self.why_low)


MAX_FORGOTTEN = 8
"""Upper limit of the files of deleted files that are removed at a time, because each removal is synced."""


FILE_SNAPSHOTS = 4
"""Size that a file reaches before the next one, in sizes of the snapshot that it begins with.

Without this a snapshot as large as `file_bytes` would be written again at each flush. With 4, snapshots take at
most a third of what other records take.
"""


class Journal:
    """An open journal, see the module. All methods belong to one thread, the broker's."""

    def __init__(
        self,
        folder: Path,
        run: str,
        config: JournalConfig,
        claim: Claim,
        here: Survey,
        on_durable: Callable[[], None],
    ) -> None:
        self._folder, self._run, self._config, self._claim = folder, run, config, claim
        self.losses = [*here.accepted, *here.losses]
        """Damage that was accepted."""
        self._files = dict(here.files)
        self._recoverable, self._since = dict(here.files), here.snapshot
        self._readers = Readers(folder)
        self._space = Space(folder, config, lambda: self.nbytes)
        self._first = here.next_number
        """Number of this process's first record, among all records of the journal."""
        self._snapshot_file = here.snapshot.file if here.snapshot else min(self._files, default=1)
        self._rotate_at = self._full(here.snapshot.nbytes if here.snapshot else 0)
        self._closed = False
        self._file, header = max([0, here.mark.file, *self._files]), b""
        damaged = any(loss.file >= self._file for loss in self.losses)
        # Nothing is appended after damage.
        if damaged or self._file not in self._files:
            header = self._new_file(self._file + 1, self._first)
            self._files[self._file] = len(header)
        start = 0 if header else self._files[self._file]
        self._writer = Writer(config, claim, self._file, start, header, on_durable)
        self._released = list(here.released)
        """Numbers of files that were deleted and still have an empty file that stands for them."""
        self._needed: set[int] = set()
        self._below = self._at = 0
        """The files below `_below` that are not `_needed` may go once the disk has `_at` records; 0: none is to go."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        run: str,
        config: JournalConfig,
        accept_loss: bool = False,
        on_durable: Callable[[], None] = lambda: None,
    ) -> "Journal":
        """Open the journal of a run, or begin one. A torn end, which a killed writer leaves, is cut.

        Args:
            accept_loss: go on without records that are damaged or missing; `losses` lists them.
            on_durable: called from the writer's thread when `durable` rises there, or the disk fails.

        Raises:
            JournalError: another process uses the journal, it belongs to another run, it is damaged elsewhere
                than at its end, or the disk is full.
        """
        claim = Claim(folder)
        try:
            here = survey(folder)
            check(folder, here, run=run, accept_loss=accept_loss)
            repair(folder, here)
            if here.losses:
                accept(folder, [*here.accepted, *here.losses])
            journal = cls(folder, run, config, claim, here, on_durable)
        except OSError as error:
            claim.close()
            raise JournalError(f"{folder}: {error.strerror}; make room, or check the disk") from error
        except BaseException:
            claim.close()
            raise
        if journal.blocked:
            journal.abandon()
            raise JournalError(
                f"{folder}: {journal.blocked}; make room, or put the run folder on another disk"
            )
        return journal

    def recovered(self) -> Iterator[Record]:
        """Yield the records that the journal held when it was opened, from its newest snapshot on."""
        since = self._since or Place(0, 0, 0)
        for number in sorted(n for n in self._recoverable if n >= since.file):
            contents = read_file(self._folder, number)
            for item in contents.found:
                if (
                    isinstance(item, Loss)
                    or item.place.offset + item.place.nbytes > self._recoverable[number]
                ):
                    continue
                if item.place >= since:
                    yield contents.record(item)

    # --- writing ------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of records appended by this process."""
        return self._writer.count

    @property
    def durable(self) -> int:
        """Number of records of this process that are safe, counted from its first one without a gap."""
        return self._writer.durable

    @property
    def blocked(self) -> str:
        """Reason why nothing can be written now; "" if writing works."""
        return self._writer.blocked

    def append(self, kind: Kind, *parts: Buffer) -> Place:
        """Buffer a record whose payload is ``parts``, joined; return the place of the payload."""
        return self._append(kind, parts)

    def _append(self, kind: Kind, parts: tuple[Buffer, ...], header: bytes = b"") -> Place:
        file, nbytes = self._file, sum(map(len, parts))
        head = record_head(kind, self._first + self._writer.count, parts)
        start = self._files[file]
        offset = start + len(header) + HEAD_BYTES
        before = (header, head) if header else (head,)
        self._writer.add(file, start, (*before, *parts), offset + nbytes - start)
        self._files[file] = offset + nbytes
        return Place(file, offset, nbytes)

    def flush(self) -> None:
        """Write what is buffered, or have the writer's thread do so. Call it after each batch and each tick.

        Raises:
            JournalError: the disk lost data that it had accepted; the broker must end.
        """
        self._writer.flush()
        self._release()

    def sync(self, timeout_s: float = 30.0) -> bool:
        """Wait until the disk has everything; return False if that takes longer than ``timeout_s``."""
        return self._writer.sync(timeout_s)

    # --- files --------------------------------------------------------------------------------------------

    @property
    def wants_snapshot(self) -> bool:
        """Whether the current file is full, and a new one can be begun."""
        return self._files[self._file] > self._rotate_at and not self.blocked

    def _full(self, snapshot_nbytes: int) -> int:
        """Return the bytes after which a file with a snapshot of this size is full."""
        return max(self._config.file_bytes, FILE_SNAPSHOTS * snapshot_nbytes)

    def postpone(self, snapshot_nbytes: int) -> None:
        """Go on in the current file, because the snapshot is too large for a record.

        `wants_snapshot` asks again when the file has grown by ``snapshot_nbytes``.
        """
        self._rotate_at = self._files[self._file] + snapshot_nbytes
        log.error(
            "journal: a snapshot of %d bytes is more than a record holds (%d): the journal goes on in %s, and no file "
            "is deleted; put fewer tasks, or tasks with less data",
            snapshot_nbytes, MAX_PAYLOAD_BYTES, file_name(self._file),
        )  # fmt: skip

    def rotate(self, snapshot: bytes) -> Place:
        """Go on in a new file, which begins with ``snapshot``; return the snapshot's place."""
        header = self._new_file(self._file + 1, self._first + self._writer.count)
        place = self._append(Kind.SNAPSHOT, (snapshot,), header)
        self._snapshot_file = self._file
        self._rotate_at = self._full(len(snapshot))
        self.flush()
        return place

    def _new_file(self, number: int, first: int) -> bytes:
        header = Header(self._run, number, first, self._files.get(number - 1, 0))
        self._file = number
        self._files[number] = 0
        return pack_header(header)

    def retain(self, needed: Iterable[int]) -> None:
        """Delete the oldest files that hold nothing needed, while the journal is larger than `keep_bytes`.

        Deletion waits until the disk has the newest snapshot and all records appended by now; then `flush`
        does it. A call while a deletion is pending does not change it, because that would only postpone it.
        """
        if not self.releasing:
            self._needed, self._below, self._at = set(needed), self._snapshot_file, self._writer.count
        self._release()

    @property
    def releasing(self) -> bool:
        """Whether a deletion that `retain` asked for is pending."""
        return self._below > 0

    def _release(self) -> None:
        """Do the deletion that was asked for, if the disk has what it rests on."""
        ready = self._writer.durable_file >= self._below and self._writer.synced >= self._at
        if not self.releasing or not ready:
            return
        below, self._below = self._below, 0
        gone = list[int]()
        try:
            for number in sorted(number for number in self._files if number < below):
                if self.nbytes <= self._config.keep_bytes:
                    break
                if number not in self._needed:
                    release(self._folder, number)
                    del self._files[number]
                    gone.append(number)
                    self._released.append(number)
            if gone:
                finish_release(self._folder, gone)
            self._forget_released()
        except OSError as error:
            log.warning("journal: files that nothing needs are not deleted: %s", error)
        for number in gone:
            self._readers.forget(number)

    def _forget_released(self) -> None:
        below = sorted(number for number in self._released if number < min(self._files))
        # The empty file with the highest number stands for all deleted files before it.
        for number in below[:-1][:MAX_FORGOTTEN]:
            forget_released(self._folder, number)
            self._released.remove(number)

    @property
    def nbytes(self) -> int:
        """Bytes of all files together, buffered records included."""
        return sum(self._files.values())

    @property
    def low(self) -> bool:
        """Whether no more segments may be accepted: the disk is nearly full, or the journal is too large."""
        return self._space.is_low()

    @property
    def why_low(self) -> str:
        """Say what `low` found the last time it looked: which room is short, in bytes; "" if none is."""
        return self._space.why_low

    # --- reading ------------------------------------------------------------------------------------------

    def holds(self, place: Place) -> bool:
        """Return whether a record can be at this place: the file exists, and no accepted loss covers it."""
        end = place.offset + place.nbytes
        return place.file in self._files and not any(
            loss.file == place.file and loss.offset < end and place.offset < loss.offset + loss.nbytes
            for loss in self.losses
        )

    def read(self, place: Place) -> bytes:
        """Read the payload of a record.

        Raises:
            JournalError: the record is missing or damaged.
            TryLater: the machine lacks the resources to read it now.
        """
        start, nbytes = place.offset - HEAD_BYTES, HEAD_BYTES + place.nbytes
        data = self._writer.find(place.file, start, nbytes)
        return payload_at(data or self._readers.read(place.file, start, nbytes), place)

    # --- closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write and sync what is left, as far as the disk takes it, and unlock the journal."""
        self._leave(write=True)

    def abandon(self) -> None:
        """End as a killed process does: records that are not written are lost."""
        self._leave(write=False)

    def _leave(self, *, write: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.close(write=write)
        self._readers.close()
        self._claim.close()
