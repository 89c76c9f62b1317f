"""The broker's write-ahead journal: records appended to files, safe before anybody is told of what they say.

What is appended is buffered; `flush` has it written, and `durable` says up to which record it is safe: when the system
has it ("written"), or when the disk has it ("synced"). A file that has grown large is followed by another, which begins
with a snapshot; files that nothing needs any more are kept as a flight record while there is room for them.
docs/understand/journal.md has the format, and says what survives what.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from broker.errors import JournalError, TryLater
from broker.journal.config import JournalConfig
from broker.journal.files import Survey, read_file, survey
from broker.journal.opening import accept, check, claim, release, released_name, repair
from broker.journal.records import (
    HEAD_BYTES,
    DeadLetter,
    Header,
    Kind,
    Loss,
    Place,
    Record,
    file_name,
    pack_dead_letter,
    pack_header,
    pack_segment,
    payload_at,
    record_head,
    unpack_dead_letter,
    unpack_segment,
)
from broker.journal.writer import Writer
from protocol.codec import Buffer

__all__ = [
    "DeadLetter", "Journal", "JournalError", "Kind", "Place", "Record",
    "pack_dead_letter", "pack_segment", "unpack_dead_letter", "unpack_segment",
]  # fmt: skip

log = logging.getLogger(__name__)

SPACE_S = 0.2
MAX_OPEN = 16
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of reading that say nothing of what is read."""


class Journal:
    """See the module. All methods belong to one thread, that of the broker."""

    def __init__(
        self,
        folder: Path,
        run: str,
        config: JournalConfig,
        lock: int,
        here: Survey,
        on_durable: Callable[[], None],
    ) -> None:
        self._folder, self._run, self._config, self._lock = folder, run, config, lock
        self.losses = [*here.accepted, *here.losses]
        """Damage that was accepted."""
        self._files, self._released = dict(here.files), list(here.released)
        self._recoverable, self._since = dict(here.files), here.snapshot
        self._readers: dict[int, int] = {}
        self._first = here.next_number
        """Number of this process's first record, among all of the journal."""
        self._snapshot_file = here.snapshot.file if here.snapshot else min(self._files, default=1)
        self._needed: set[int] = set()
        self._releasable = self._release_at = 0
        """Files below this one may be deleted if they are not needed; 0: nothing is to be deleted. And the record up
        to which the disk must have all, for what says that they are not needed is among it."""
        self._low, self._looked_at = False, float("-inf")
        self._file, header = max([0, here.mark, *self._files]), b""
        damaged = any(loss.file >= self._file for loss in self.losses)
        if damaged or self._file not in self._files:  # behind damage nothing is appended
            header = self._new_file(self._file + 1, self._first)
            self._files[self._file] = len(header)
        self._writer = Writer(folder, config, lock, self._file, header, on_durable)

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
        """Take the journal of a run, or begin one. A torn end, as a killed writer leaves it, is cut.

        Args:
            accept_loss: go on without what is damaged or missing; `losses` lists it.
            on_durable: called from another thread when `durable` has risen there, or the disk has failed.

        Raises:
            JournalError: another process has it, it is another run's, it is damaged elsewhere than at its end, or
                the disk is full.
        """
        lock = claim(folder)
        try:
            here = survey(folder)
            check(folder, here, run=run, accept_loss=accept_loss)
            repair(folder, here)
            if here.losses:
                accept(folder, [*here.accepted, *here.losses])
            journal = cls(folder, run, config, lock, here, on_durable)
        except OSError as error:
            os.close(lock)
            raise JournalError(f"{folder}: {error.strerror}; make room, or check the disk") from error
        except BaseException:
            os.close(lock)
            raise
        if journal.blocked:
            journal.abandon()
            raise JournalError(
                f"{folder}: {journal.blocked}; make room, or put the run folder on another disk"
            )
        return journal

    def recovered(self) -> Iterator[Record]:
        """What the journal held when it was opened, from its newest snapshot on."""
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
        """Records appended by this process."""
        return self._writer.count

    @property
    def durable(self) -> int:
        """Records of this process up to which all are safe."""
        return self._writer.durable

    @property
    def blocked(self) -> str:
        """Why nothing can be written now; "" if it can."""
        return self._writer.blocked

    def append(self, kind: Kind, *parts: Buffer) -> Place:
        """Buffer a record whose payload is ``parts`` one behind the other."""
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
        """Write what is buffered, or have the sync thread do so; call it after each batch of messages and each tick.

        Raises:
            JournalError: the disk lost what it had taken; the broker has to end.
        """
        self._writer.flush()
        if self._releasable:
            self._release()

    def sync(self, timeout_s: float = 30.0) -> bool:
        """Wait until the disk has everything; False if that takes longer."""
        return self._writer.sync(timeout_s)

    # --- files --------------------------------------------------------------------------------------------

    @property
    def wants_snapshot(self) -> bool:
        """Whether the current file is large enough, and the next can be begun."""
        return self._files[self._file] > self._config.file_bytes and not self.blocked

    def rotate(self, snapshot: bytes) -> Place:
        """Go on in a new file, which begins with ``snapshot``."""
        header = self._new_file(self._file + 1, self._first + self._writer.count)
        place = self._append(Kind.SNAPSHOT, (snapshot,), header)
        self._snapshot_file = self._file
        self.flush()
        return place

    def _new_file(self, number: int, first: int) -> bytes:
        header = Header(self._run, number, first, self._files.get(number - 1, 0))
        self._file = number
        self._files[number] = 0
        return pack_header(header)

    def retain(self, needed: Iterable[int]) -> None:
        """Delete the oldest files that hold nothing needed, while there is more than is to be kept.

        Only once the disk has a later snapshot, and all that was appended by now: until then nothing is deleted,
        and `flush` comes back to it. What is asked for meanwhile would only put that off, and is passed over.
        """
        if not self._releasable:
            self._needed, self._releasable = set(needed), self._snapshot_file
            self._release_at = self._writer.count
        self._release()

    def _release(self) -> None:
        if self._writer.durable_file < self._releasable or self._writer.synced < self._release_at:
            return
        limit, self._releasable = self._releasable, 0
        try:
            for number in sorted(self._files):
                if number >= limit or self.nbytes <= self._config.keep_bytes:
                    break
                if number not in self._needed:
                    self._delete(number)
            below = sorted(number for number in self._released if number < min(self._files))
            for number in below[:-1]:  # the last one stands for all before it
                (self._folder / released_name(number)).unlink()
                self._released.remove(number)
        except OSError as error:
            log.warning("journal: files that nothing needs are not deleted: %s", error)

    def _delete(self, number: int) -> None:
        if number in self._readers:
            os.close(self._readers.pop(number))
        release(self._folder, number)
        del self._files[number]
        self._released.append(number)

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(self._files.values())

    @property
    def low(self) -> bool:
        """Whether segments must not be let in: little is free on the disk, or too much is needed already."""
        now = time.monotonic()
        if now - self._looked_at >= SPACE_S:
            self._looked_at = now
            try:
                space = os.statvfs(self._folder)
                free = space.f_bavail * space.f_frsize
            except OSError as error:
                log.warning("journal: %s: %s", self._folder, error.strerror)
                free = 0
            self._low = free < self._config.min_free_bytes or self.nbytes > self._config.max_bytes
        return self._low

    # --- reading ------------------------------------------------------------------------------------------

    def holds(self, place: Place) -> bool:
        """Whether a record can be there: no accepted loss took it."""
        end = place.offset + place.nbytes
        return place.file in self._files and not any(
            loss.file == place.file and loss.offset < end and place.offset < loss.offset + loss.nbytes
            for loss in self.losses
        )

    def read(self, place: Place) -> bytes:
        """Payload of a record.

        Raises:
            JournalError: it is not there, or not what was written.
            TryLater: it cannot be read now.
        """
        start, nbytes = place.offset - HEAD_BYTES, HEAD_BYTES + place.nbytes
        data = self._writer.find(place.file, start, nbytes)
        try:
            data = data or os.pread(self._reader(place.file), nbytes, start)
        except OSError as error:
            kind = TryLater if error.errno in PASSING else JournalError
            raise kind(f"{self._folder / file_name(place.file)}: {error.strerror}") from None
        return payload_at(data, place)

    def _reader(self, number: int) -> int:
        fd = self._readers.pop(number, None)
        if fd is None:
            fd = os.open(self._folder / file_name(number), os.O_RDONLY | os.O_CLOEXEC)
        self._readers[number] = fd  # the most recent is the last
        while len(self._readers) > MAX_OPEN:
            os.close(self._readers.pop(next(iter(self._readers))))
        return fd

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write and sync what is left, as far as the disk takes it; the journal is free for another process."""
        self._leave(write=True)

    def abandon(self) -> None:
        """End as a killed process does: what is not written is lost."""
        self._leave(write=False)

    def _leave(self, *, write: bool) -> None:
        if self._lock < 0:
            return
        self._writer.close(write=write)
        for fd in self._readers.values():
            os.close(fd)
        self._readers = {}
        os.close(self._lock)
        self._lock = -1
