"""The broker's write-ahead journal: records appended to files, safe before anybody is told of what they say.

One writer. What is appended is buffered; `flush` writes it, and `durable` says up to which record it is safe: when
the system has it ("written"), or when the disk has it ("synced", where one fdatasync serves all that was appended while
the one before ran). A file that has grown large is followed by another, which begins with a snapshot; files that
nothing needs any more are kept as a flight record while there is room. docs/journal.md has the format.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from broker.journal_config import JournalConfig
from broker.journal_files import Contents, gaps, numbers, since_snapshot
from broker.journal_records import (
    HEAD_BYTES,
    DeadLetter,
    Header,
    JournalError,
    Kind,
    Loss,
    Place,
    Record,
    file_name,
    pack_dead_letter,
    pack_header,
    pack_segment,
    record_at,
    record_head,
    unpack_dead_letter,
    unpack_segment,
)

__all__ = [
    "DeadLetter", "Journal", "JournalError", "Kind", "Place", "Record",
    "pack_dead_letter", "pack_segment", "unpack_dead_letter", "unpack_segment",
]  # fmt: skip

log = logging.getLogger(__name__)

LOCK = "lock"
RETRY_S = 0.5
SPACE_S = 0.2
MAX_OPEN = 16
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Journal:
    """See the module. All methods but the sync thread's belong to one thread."""

    def __init__(
        self, folder: Path, run: str, config: JournalConfig, lock: IO[str], on_durable: Callable[[], None]
    ) -> None:
        self._folder, self._run, self._config = folder, run, config
        self._lock_file, self._on_durable = lock, on_durable
        self._files: dict[int, int] = {}
        """Bytes of each file."""
        self._recovered: list[Contents] = []
        self._readers: dict[int, int] = {}
        self._file = self._snapshot_file = self._fd = 0
        self._first = 0
        """Number of this process's first record, among all of the journal."""
        self._count = 0
        self._end = 0
        """Where the next record will stand."""
        self._guard = threading.Condition()
        """Over what the sync thread shares: everything below."""
        self._buffer = bytearray()
        self._written = 0
        self._ends: deque[int] = deque()
        """Where each record ends that is not written yet."""
        self._recent: dict[int, bytes] = {}
        """Records that are not written yet, by where they stand."""
        self._durable = 0
        self._blocked, self._retry_at = "", 0.0
        self._dirty = self._closing = False
        self._failed: BaseException | None = None
        self._low, self._looked_at = False, 0.0
        self._thread = threading.Thread(target=self._sync_loop, name="journal", daemon=True)

    # --- opening ------------------------------------------------------------------------------------------

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
        """Take the journal of a run, or begin one. A torn tail, as a killed writer leaves it, is cut.

        Raises:
            JournalError: another process has it, it is another run's, or it is damaged elsewhere than at its end
                (``accept_loss``: go on without what is damaged).
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise JournalError(f"{folder} is in use by another broker; end that first") from None
        journal = cls(folder, run, config, lock, on_durable)
        try:
            journal._take_up(accept_loss)
        except BaseException:
            lock.close()
            raise
        journal._thread.start()
        return journal

    def _take_up(self, accept_loss: bool) -> None:
        files = self._without_torn_end(since_snapshot(self._folder))
        lost = gaps(self._folder, files) + [loss for contents in files for loss in contents.losses]
        if lost and not accept_loss:
            raise JournalError(
                f"{self._folder} is damaged: {'; '.join(map(str, lost[:3]))} ({len(lost)} places in all). Restore it "
                "from a copy, or start the broker with --accept-loss to go on without these records"
            )
        for contents in files:
            if contents.header is not None and contents.header.run != self._run:
                raise JournalError(f"{self._folder} belongs to run {contents.header.run!r}, this is {self._run!r}")
        self._files = {n: (self._folder / file_name(n)).stat().st_size for n in numbers(self._folder)}
        self._recovered = files
        entries = [entry for contents in files for entry in contents.entries]
        self._first = entries[-1].number + 1 if entries else 0
        if not files or lost:  # behind damage nothing is appended
            self._begin_file(max(self._files, default=0) + 1)
        else:
            self._file = files[-1].number
            self._fd = os.open(self._folder / file_name(self._file), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            self._end = self._written = self._files[self._file]
        self._snapshot_file = files[0].number if files else self._file

    def _without_torn_end(self, files: list[Contents]) -> list[Contents]:
        """Cut what a killed writer left half written at the very end."""
        while files:
            last = files[-1]
            if last.entries or not all(loss.torn for loss in last.losses):
                break
            if last.header is not None and not last.losses and len(files) == 1:
                break  # begun, and nothing said yet
            log.warning("%s was never begun in full: it is removed", file_name(last.number))
            (self._folder / file_name(last.number)).unlink()
            files = files[:-1]
        if files and files[-1].losses and files[-1].losses[-1].torn:
            last, loss = files[-1], files[-1].losses[-1]
            log.warning("a torn end is cut: %s", loss)
            with open(self._folder / file_name(last.number), "r+b") as file:
                file.truncate(loss.offset)
                os.fsync(file.fileno())
            found = [item for item in last.found if item is not loss]
            files = [*files[:-1], last._replace(data=last.data[: loss.offset], found=found)]
        return files

    def recovered(self) -> Iterator[Record]:
        """What the journal holds, from its newest snapshot on; once."""
        files, self._recovered = self._recovered, []
        for contents in files:
            for entry in contents.entries:
                yield contents.record(entry)

    def _begin_file(self, number: int) -> None:
        path = self._folder / file_name(number)
        header = pack_header(Header(self._run, number, self._first + self._count, self._files.get(number - 1, 0)))
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _sync_folder(self._folder)
        if self._fd:
            os.close(self._fd)
        self._fd, self._file = fd, number
        self._files[number] = self._written = 0
        self._buffer += header
        self._end = len(header)

    # --- writing ------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Records appended by this process."""
        return self._count

    @property
    def durable(self) -> int:
        """Records of this process up to which all are safe."""
        return self._durable

    @property
    def blocked(self) -> str:
        """Why nothing can be written now; "" if it can."""
        return self._blocked

    def append(self, kind: Kind, *parts: bytes) -> Place:
        """Buffer a record whose payload is ``parts`` one behind the other."""
        head = record_head(kind, self._first + self._count, parts)
        record = b"".join((head, *parts))
        place = Place(self._file, self._end + HEAD_BYTES, len(record) - HEAD_BYTES)
        with self._guard:
            self._buffer += record
            self._recent[self._end] = record
            self._end += len(record)
            self._ends.append(self._end)
            self._count += 1
        return place

    def flush(self) -> None:
        """Write what is buffered, or have the sync thread do so.

        Raises:
            JournalError: the disk failed otherwise than by being full.
        """
        if self._failed is not None:
            raise JournalError(f"{self._folder / file_name(self._file)}: {self._failed}; the journal cannot go on")
        with self._guard:
            if not self._buffer or (self._blocked and time.monotonic() < self._retry_at):
                return
            if self._config.durability == "synced":
                self._guard.notify()
            else:
                self._write()
                self._durable = self._count - len(self._ends)

    def _write(self) -> None:
        """As much of the buffer as the disk takes; it goes on later exactly where it stopped."""
        try:
            while self._buffer:
                with memoryview(self._buffer) as view:
                    done = os.write(self._fd, view)
                del self._buffer[:done]
                self._written += done
                self._files[self._file] = self._written
                self._dirty = True
            self._blocked = ""
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise JournalError(f"{self._folder / file_name(self._file)}: {error}") from error
            self._retry_at = time.monotonic() + RETRY_S
            self._blocked = self._blocked or f"{error.strerror} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        finally:
            while self._ends and self._ends[0] <= self._written:
                self._ends.popleft()
            if not self._buffer:
                self._recent.clear()
            for offset in [o for o, record in self._recent.items() if o + len(record) <= self._written]:
                del self._recent[offset]

    def _sync_loop(self) -> None:
        synced = self._config.durability == "synced"
        try:
            while self._sync(synced):
                pass
        except (OSError, JournalError) as error:
            if not self._closing:
                self._failed = error
                self._on_durable()

    def _sync(self, synced: bool) -> bool:
        """One round of the sync thread; False at the end."""
        with self._guard:
            if not self._closing and (not synced or not self._buffer or self._blocked):
                self._guard.wait(self._config.sync_interval_s)
            if self._closing:
                return False
            if synced:
                self._write()
            if not self._dirty:
                return True
            fd, reached, self._dirty = os.dup(self._fd), self._count - len(self._ends), False
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if synced:
            self._durable = max(self._durable, reached)
            self._on_durable()
        return True

    # --- files --------------------------------------------------------------------------------------------

    @property
    def wants_snapshot(self) -> bool:
        """Whether the current file is large enough."""
        return self._end >= self._config.file_bytes and not self._blocked

    def rotate(self, snapshot: bytes) -> None:
        """Go on in a new file that begins with ``snapshot``; no effect while the disk is full."""
        with self._guard:
            self._write()
            if self._buffer:
                return
            os.fsync(self._fd)
            self._dirty = False
            self._durable = self._count
            try:
                self._begin_file(self._file + 1)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                return
            self._snapshot_file = self._file
        self.append(Kind.SNAPSHOT, snapshot)
        self.flush()

    def retain(self, needed: Iterable[int]) -> None:
        """Delete the oldest files that hold nothing needed, while there is more than is to be kept."""
        keep = set(needed)
        for number in sorted(self._files):
            if self.nbytes <= self._config.keep_bytes:
                return
            if number < self._snapshot_file and number not in keep:
                (self._folder / file_name(number)).unlink(missing_ok=True)
                del self._files[number]
                if number in self._readers:
                    os.close(self._readers.pop(number))

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(self._files.values()) + len(self._buffer)

    @property
    def low(self) -> bool:
        """Whether segments must not be let in: little is free on the disk, or too much is needed already."""
        now = time.monotonic()
        if now - self._looked_at >= SPACE_S:
            self._looked_at = now
            space = os.statvfs(self._folder)
            free = space.f_bavail * space.f_frsize
            self._low = free < self._config.min_free_bytes or self.nbytes > self._config.max_bytes
        return self._low

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, place: Place) -> bytes:
        """Payload of a record.

        Raises:
            JournalError: it is not there, or not what was written.
        """
        start = place.offset - HEAD_BYTES
        if place.file == self._file:
            with self._guard:
                record = self._recent.get(start)
            if record is not None:
                return record[HEAD_BYTES:]
        try:
            data = os.pread(self._reader(place.file), HEAD_BYTES + place.nbytes, start)
        except OSError as error:
            raise JournalError(f"{self._folder / file_name(place.file)}: {error.strerror}") from None
        if record_at(data, 0) is None or len(data) != HEAD_BYTES + place.nbytes:
            raise JournalError(str(Loss(place.file, start, place.nbytes, 1, "a record whose checksum does not match")))
        return data[HEAD_BYTES:]

    def _reader(self, number: int) -> int:
        fd = self._readers.pop(number, None)
        if fd is None:
            fd = os.open(self._folder / file_name(number), os.O_RDONLY | os.O_CLOEXEC)
        self._readers[number] = fd  # the most recent is the last
        while len(self._readers) > MAX_OPEN:
            os.close(self._readers.pop(next(iter(self._readers))))
        return fd

    def has(self, file: int) -> bool:
        """Whether a file is there."""
        return file in self._files

    def abandon(self) -> None:
        """End as a killed process does: what is not written is lost."""
        with self._guard:
            self._closing = True
            self._buffer.clear()
            self._guard.notify()
        self._thread.join(timeout=10.0)
        self._leave()

    def close(self) -> None:
        """Write and sync what is left, as far as the disk takes it; the journal is free for another process."""
        with self._guard:
            if self._closing:
                return
            self._closing = True
            self._write()
            self._guard.notify()
        self._thread.join(timeout=10.0)
        os.fsync(self._fd)
        if not self._buffer:
            self._durable = self._count
        self._leave()

    def _leave(self) -> None:
        os.close(self._fd)
        for fd in self._readers.values():
            os.close(fd)
        self._readers = {}
        self._lock_file.close()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
