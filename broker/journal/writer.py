"""Write the journal's bytes to the disk in order, and sync them in a thread.

In mode "written" the caller of `flush` writes, and the thread syncs at intervals. In mode "synced" the thread
does both, and the records appended while it syncs are its next group. A group of records counts as written
only when all of its bytes are.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from broker.config import JournalConfig
from broker.errors import JournalError
from broker.journal.claim import Claim, Mark
from broker.journal.records import file_name
from protocol.codec import Buffer
from protocol.files import sync_folder

MAX_PARTS = os.sysconf("SC_IOV_MAX")
"""Upper limit of the buffers that one call writes without joining them first."""


@dataclass(slots=True)
class WriteGroup:
    """Whole records of one file, one after the other, that are written together."""

    file: int
    start: int
    parts: list[Buffer]
    nbytes: int
    last: int
    """Number of records appended when the group was last extended."""
    done: int = 0
    """Bytes written so far."""
    taken: bool = False
    """True while the group is being written, so that nothing is added to it."""

    @property
    def end(self) -> int:
        """One past the last byte of the group in its file."""
        return self.start + self.nbytes

    def extend(self, other: "WriteGroup") -> None:
        """Add the records of a group that follows this one in its file."""
        self.parts += other.parts
        self.nbytes += other.nbytes
        self.last = other.last

    def whole(self) -> bytes:
        """Return all bytes of the group in one piece."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        return bytes(self.parts[0])

    def write(self, fd: int) -> None:
        """Write the group to its place in the file ``fd``; after an error, go on where that came.

        Raises:
            OSError: the disk took nothing more.
        """
        parts = self.parts if not self.done else []
        for first in range(0, len(parts), MAX_PARTS):
            some = parts[first : first + MAX_PARTS]
            done = os.pwritev(fd, some, self.start + self.done)
            self.done += done
            if done < sum(map(len, some)):
                break
        # A full disk first writes less than it was given, and then fails.
        while self.done < self.nbytes:
            rest = memoryview(self.whole())[self.done :]
            self.done += os.pwrite(fd, rest, self.start + self.done)


class WriteQueue:
    """The groups that are not written yet. The broker's thread adds them; the thread that writes takes them.

    Args:
        guard: lock for what both threads use.
    """

    def __init__(self, guard: threading.Condition) -> None:
        self._guard = guard
        self._fresh: list[WriteGroup] = []
        """Groups added since the last `hand_over`; only the broker's thread uses them."""
        self._pending: deque[WriteGroup] = deque()
        """Groups handed over. Invariant: it changes only while the guard is held."""
        self.count = 0
        """Number of records added."""

    @property
    def pending(self) -> bool:
        """Whether a group that was handed over is not written yet."""
        return bool(self._pending)

    def add(self, file: int, start: int, parts: tuple[Buffer, ...], nbytes: int, records: int) -> None:
        """Add ``nbytes`` for this place of a file, after everything added before."""
        if not self._fresh or self._fresh[-1].file != file:
            self._fresh.append(WriteGroup(file, start, [], 0, self.count))
        group = self._fresh[-1]
        group.parts += parts
        group.nbytes += nbytes
        self.count += records
        group.last = self.count

    def hand_over(self) -> None:
        """Move the groups added since the last call to the pending ones."""
        if not self._fresh:
            return
        with self._guard:
            for group in self._fresh:
                last = self._pending[-1] if self._pending else None
                if last is None or last.taken or last.file != group.file:
                    self._pending.append(group)
                else:
                    last.extend(group)
        self._fresh = []

    def take(self) -> WriteGroup | None:
        """Return the oldest pending group, to which nothing is added any more; None if there is none."""
        with self._guard:
            if not self._pending:
                return None
            self._pending[0].taken = True
            return self._pending[0]

    def drop(self) -> None:
        """Drop the oldest pending group, because it is written. Hold the guard."""
        self._pending.popleft()

    def last_file(self, written: int) -> int:
        """Return the file of the newest pending group, or ``written`` if there is none. Hold the guard."""
        return self._pending[-1].file if self._pending else written

    def find(self, file: int, start: int, nbytes: int) -> bytes | None:
        """Return the bytes at this place if they are not written yet; otherwise None."""
        with self._guard:
            for group in (*self._pending, *self._fresh):
                if group.file == file and group.start <= start < group.end:
                    return group.whole()[start - group.start : start - group.start + nbytes]
        return None


log = logging.getLogger(__name__)

RETRY_S = 0.5
JOIN_S = 30.0
MAX_UNSYNCED = 8
"""Upper limit of the files that wait for a sync by the thread. At the limit, the writer syncs and waits."""


class Writer:
    """Records on their way to the disk. All methods but those of the thread belong to the broker's thread."""

    def __init__(
        self,
        config: JournalConfig,
        claim: Claim,
        newest: int,
        start: int,
        header: bytes,
        on_durable: Callable[[], None],
    ) -> None:
        """Go on in the file ``newest`` at byte ``start``, or begin the file if there is a ``header``."""
        self._claim, self._folder, self._on_durable = claim, claim.folder, on_durable
        self._synced_mode, self._interval_s = config.durability == "synced", config.sync_interval_s
        self._guard = threading.Condition()
        """Lock for what both threads use.

        Invariant: `_open`, `_written`, `_at`, `_end`, `_synced`, `_requested`, `_closing` and the queue's pending
        groups change only while it is held.
        """
        self._queue = WriteQueue(self._guard)
        self._syncing = threading.Lock()
        self._open: list[tuple[int, int]] = []
        """Number and descriptor of each file that is not synced to its end; the last one is being written."""
        self._written = self._synced = 0
        self._blocked, self._retry_at, self._failure = "", 0.0, ""
        self._requested = self._closing = False
        self._at = self.durable_file = 0
        """Number of the file written to last, and of the newest file that the disk has from its beginning."""
        self._end = 0
        """Bytes of the file written to last, as far as it has whole groups."""
        self._mark_sync_at = 0.0
        self._begin(newest)
        if header:
            self.add(newest, 0, (header,), len(header), records=0)
            self._queue.hand_over()
            self._write()
        else:
            self._at, self._end = newest, start
            self._note_written()
        self._sync()
        self._syncer = threading.Thread(target=self._work, name="journal", daemon=True)
        self._syncer.start()

    # --- from the broker's thread -------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of records added."""
        return self._queue.count

    @property
    def durable(self) -> int:
        """Number of records that are safe, counted from the first one without a gap."""
        return self._synced if self._synced_mode else self._written

    @property
    def synced(self) -> int:
        """Number of records that the disk has, counted from the first one without a gap."""
        return self._synced

    @property
    def blocked(self) -> str:
        """Reason why nothing can be written now; "" if writing works."""
        return self._blocked

    def add(self, file: int, start: int, parts: tuple[Buffer, ...], nbytes: int, records: int = 1) -> None:
        """Add ``nbytes`` for this place of a file, after everything added before."""
        self._queue.add(file, start, parts, nbytes, records)

    def flush(self) -> None:
        """Write what was added, or have the thread write it. A failed write is tried again after `RETRY_S`.

        Raises:
            JournalError: the disk did not keep data that it had accepted, or the thread failed.
        """
        if self._failure:
            raise JournalError(self._failure)
        self._queue.hand_over()
        if self._synced_mode:
            self._request()
        elif self._queue.pending and time.monotonic() >= self._retry_at:
            self._write()

    def find(self, file: int, start: int, nbytes: int) -> bytes | None:
        """Return the bytes at this place if they are not written yet; otherwise None."""
        return self._queue.find(file, start, nbytes)

    def sync(self, timeout_s: float) -> bool:
        """Wait until the disk has everything; return False if that takes longer than ``timeout_s``."""
        self.flush()
        with self._guard:
            wanted, file = self._queue.count, self._queue.last_file(self._at)
            self._requested = True
            self._guard.notify_all()
            self._guard.wait_for(lambda: self._has(wanted, file) or self._failure != "", timeout_s)
            return self._has(wanted, file)

    def _has(self, count: int, file: int) -> bool:
        return self._synced >= count and self.durable_file >= file

    def close(self, *, write: bool = True) -> None:
        """Write and sync what is left, as far as the disk takes it.

        Without ``write``, end as a killed process does: nothing more is written.
        """
        with self._guard:
            self._closing = True
            self._guard.notify_all()
        self._syncer.join(JOIN_S)
        # Invariant: the files stay open while the thread may use them.
        if self._syncer.is_alive():
            log.error("journal: the disk has not answered for %d s", JOIN_S)
            return
        try:
            if write and not self._failure:
                self._queue.hand_over()
                self._write()
                self._sync()
        except JournalError as error:
            self._failure = str(error)
        finally:
            for _, fd in self._open:
                os.close(fd)
        if write and (self._failure or self._queue.pending):
            left = self.count - self.durable
            log.error("journal: %d records are not safe: %s", left, self._failure or self._blocked)

    def _request(self) -> None:
        with self._guard:
            if self._queue.pending:
                self._requested = True
                self._guard.notify_all()

    # --- writing: by the broker's thread, or by the journal's in mode "synced" -----------------------------

    def _write(self) -> None:
        try:
            while (group := self._queue.take()) is not None:
                if not self._open or group.file != self._open[-1][0]:
                    self._begin(group.file)
                self._write_group(group, self._open[-1][1])
        except OSError as error:
            # A group that is not written stays pending, and is written to the same place later.
            self._retry_at = time.monotonic() + RETRY_S
            self._blocked = self._blocked or f"{error.strerror} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        else:
            self._blocked, self._retry_at = "", 0.0

    def _begin(self, file: int) -> None:
        if len(self._open) >= MAX_UNSYNCED:
            self._sync()
        path = self._folder / file_name(file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._guard:
            self._open.append((file, fd))

    def _write_group(self, group: WriteGroup, fd: int) -> None:
        group.write(fd)
        with self._guard:
            self._queue.drop()
            self._written, self._at, self._end = group.last, group.file, group.end
        self._note_written()

    def _note_written(self) -> None:
        """Say how much the operating system has, where the broker answers on the strength of that."""
        if not self._synced_mode:
            self._claim.wrote(Mark(self._at, self._end))

    # --- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                if self._synced_mode and self._queue.pending and time.monotonic() >= self._retry_at:
                    self._write()
                if self._sync() and self._synced_mode:
                    self._on_durable()
        except Exception as error:
            # Whatever the error is, the broker must not wait for this thread any more.
            with self._guard:
                self._failure = (
                    str(error) if isinstance(error, JournalError) else f"the journal's thread: {error!r}"
                )
                self._guard.notify_all()
            self._on_durable()

    def _wait(self) -> bool:
        """Wait for a request or the next interval; return False when the writer is closing."""
        with self._guard:
            if not self._requested and not self._closing:
                idle = None if not self._queue.pending else RETRY_S
                self._guard.wait(idle if self._synced_mode else self._interval_s)
            self._requested = False
            return not self._closing

    def _sync(self) -> bool:
        """Have the disk take what is written; return whether the disk has more records than before.

        Raises:
            JournalError: the disk failed. Do not sync again: the disk might then report lost data as kept.
        """
        try:
            with self._syncing:
                return self._sync_files()
        except OSError as error:
            raise JournalError(self._describe(error)) from error

    def _sync_files(self) -> bool:
        with self._guard:
            reached, files = self._written, list(self._open)
            at, end = self._at, self._end
        if reached == self._synced and at == self.durable_file:
            return False
        self._claim.check()
        # Older files first, so that the disk has no record without those before it.
        for _, fd in files:
            os.fdatasync(fd)
        began = at != self.durable_file
        if began:
            sync_folder(self._folder)
        self._mark(Mark(at, end), sync=began)
        self.durable_file = at
        with self._guard:
            for _, fd in files[:-1]:
                os.close(fd)
            self._open = self._open[len(files) - 1 :]
            rose, self._synced = reached > self._synced, reached
            self._guard.notify_all()
        return rose

    def _mark(self, mark: Mark, *, sync: bool) -> None:
        """Mark what the disk has. The mark is synced at intervals, because each sync makes answers wait."""
        now = time.monotonic()
        sync = sync or now >= self._mark_sync_at
        self._claim.mark(mark, sync=sync)
        if sync:
            self._mark_sync_at = now + self._interval_s

    def _describe(self, error: OSError) -> str:
        place = file_name(self._open[-1][0]) if self._open else ""
        return (
            f"{self._folder / place}: {error.strerror}: the disk did not keep what it had taken; start the broker "
            "again, on another disk if this is repeated"
        )
