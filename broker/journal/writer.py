"""Puts the journal's bytes on the disk: in order, all or none of a group, with a thread that syncs.

In mode "written" the caller of `flush` writes and the thread syncs now and then; in mode "synced" the thread does both,
and what is appended while it syncs is its next group.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from broker.errors import JournalError
from broker.journal.config import JournalConfig
from broker.journal.opening import write_mark
from broker.journal.records import file_name
from protocol.codec import Buffer
from protocol.whole_files import sync_folder

log = logging.getLogger(__name__)

RETRY_S = 0.5
JOIN_S = 30.0
MAX_PARTS = os.sysconf("SC_IOV_MAX")
"""Written with one call, without being put together before."""
MAX_UNSYNCED = 8
"""Files that may wait for the thread; with more, the writer waits for the disk."""


@dataclass(slots=True)
class WriteGroup:
    """Bytes that are written together: whole records of one file, one behind the other."""

    file: int
    start: int
    parts: list[Buffer]
    nbytes: int
    last: int
    """Records appended when the group was last added to."""
    done: int = 0
    """Bytes written."""
    taken: bool = False
    """Being written: nothing more is added."""

    def whole(self) -> bytes:
        """All of it in one piece."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        return bytes(self.parts[0])


class Writer:
    """What is appended, until it is safe. All methods but those of the thread belong to one thread."""

    def __init__(
        self,
        folder: Path,
        config: JournalConfig,
        lock: int,
        newest: int,
        header: bytes,
        on_durable: Callable[[], None],
    ) -> None:
        """``newest``: the file to go on in; with a ``header``, the one to begin."""
        self._folder, self._lock, self._on_durable = folder, lock, on_durable
        self._synced_mode, self._interval_s = config.durability == "synced", config.sync_interval_s
        self._fresh: list[WriteGroup] = []
        """Added since the last `flush`; of no concern to the thread."""
        self._guard = threading.Condition()
        """Over what both threads change: everything below."""
        self._syncing = threading.Lock()
        self._pending: deque[WriteGroup] = deque()
        self._open: list[tuple[int, int]] = []
        """Number and descriptor of the file written to, and before it of those that are not synced to their end."""
        self._count = self._written = self._synced = 0
        self._blocked, self._retry_at, self._failure = "", 0.0, ""
        self._requested = self._closing = False
        self._at = self.durable_file = 0
        """The file of what was written last; the newest that the disk has from its beginning."""
        self._begin(newest)
        if header:
            self.add(newest, 0, (header,), len(header), records=0)
            self._hand_over()
            self._write()
        else:
            self._at = newest
        self._sync()
        self._syncer = threading.Thread(target=self._work, name="journal", daemon=True)
        self._syncer.start()

    # --- from the broker's thread -------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Records added."""
        return self._count

    @property
    def durable(self) -> int:
        """Records up to which all are safe."""
        return self._synced if self._synced_mode else self._written

    @property
    def synced(self) -> int:
        """Records up to which the disk has all."""
        return self._synced

    @property
    def blocked(self) -> str:
        """Why nothing can be written now."""
        return self._blocked

    def add(self, file: int, start: int, parts: tuple[Buffer, ...], nbytes: int, records: int = 1) -> None:
        """``nbytes`` for that place of a file, behind everything added before."""
        if not self._fresh or self._fresh[-1].file != file:
            self._fresh.append(WriteGroup(file, start, [], 0, self._count))
        group = self._fresh[-1]
        group.parts += parts
        group.nbytes += nbytes
        self._count += records
        group.last = self._count

    def _hand_over(self) -> None:
        """What was added is to be written."""
        if not self._fresh:
            return
        with self._guard:
            for group in self._fresh:
                last = self._pending[-1] if self._pending else None
                if last is None or last.taken or last.file != group.file:
                    self._pending.append(group)
                else:
                    last.parts += group.parts
                    last.nbytes += group.nbytes
                    last.last = group.last
        self._fresh = []

    def flush(self) -> None:
        """Write what was added, or have the thread do so; while the disk takes nothing, try now and then.

        Raises:
            JournalError: the disk did not keep what it had taken.
        """
        if self._failure:
            raise JournalError(self._failure)
        self._hand_over()
        if self._synced_mode:
            self._request()
        elif self._pending and time.monotonic() >= self._retry_at:
            self._write()

    def find(self, file: int, start: int, nbytes: int) -> bytes | None:
        """Bytes that are not written yet."""
        with self._guard:
            for group in (*self._pending, *self._fresh):
                if group.file == file and group.start <= start < group.start + group.nbytes:
                    return group.whole()[start - group.start : start - group.start + nbytes]
        return None

    def sync(self, timeout_s: float) -> bool:
        """Wait until the disk has everything; False if that took longer."""
        self.flush()
        with self._guard:
            wanted, file = self._count, self._pending[-1].file if self._pending else self._at
            self._requested = True
            self._guard.notify_all()
            self._guard.wait_for(lambda: self._has(wanted, file) or self._failure != "", timeout_s)
            return self._has(wanted, file)

    def _has(self, count: int, file: int) -> bool:
        return self._synced >= count and self.durable_file >= file

    def close(self, *, write: bool = True) -> None:
        """Write and sync what is left, as far as the disk takes it. Without ``write``: end as a killed process does."""
        with self._guard:
            self._closing = True
            self._guard.notify_all()
        self._syncer.join(JOIN_S)
        if self._syncer.is_alive():  # what it holds must not be taken from under it
            log.error("journal: the disk has not answered for %d s", JOIN_S)
            return
        try:
            if write and not self._failure:
                self._hand_over()
                self._write()
                self._sync()
        except JournalError as error:
            self._failure = str(error)
        finally:
            for _, fd in self._open:
                os.close(fd)
        if write and (self._failure or self._pending):
            left = self._count - self.durable
            log.error("journal: %d records are not safe: %s", left, self._failure or self._blocked)

    def _request(self) -> None:
        with self._guard:
            if self._pending:
                self._requested = True
                self._guard.notify_all()

    # --- writing: the broker's thread, or the other in mode "synced" ---------------------------------------

    def _write(self) -> None:
        try:
            while (group := self._take()) is not None:
                if not self._open or group.file != self._open[-1][0]:
                    self._begin(group.file)
                self._write_group(group, self._open[-1][1])
        except OSError as error:  # what is not written is kept, and written again to the same place
            self._retry_at = time.monotonic() + RETRY_S
            self._blocked = self._blocked or f"{error.strerror} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        else:
            self._blocked, self._retry_at = "", 0.0

    def _take(self) -> WriteGroup | None:
        with self._guard:
            if not self._pending:
                return None
            self._pending[0].taken = True
            return self._pending[0]

    def _begin(self, file: int) -> None:
        if len(self._open) >= MAX_UNSYNCED:
            self._sync()
        path = self._folder / file_name(file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._guard:
            self._open.append((file, fd))

    def _write_group(self, group: WriteGroup, fd: int) -> None:
        parts = group.parts if not group.done else []
        for first in range(0, len(parts), MAX_PARTS):
            some = parts[first : first + MAX_PARTS]
            done = os.pwritev(fd, some, group.start + group.done)
            group.done += done
            if done < sum(map(len, some)):
                break
        while group.done < group.nbytes:  # a full disk first writes less than it was given, and then fails
            rest = memoryview(group.whole())[group.done :]
            group.done += os.pwrite(fd, rest, group.start + group.done)
        with self._guard:
            self._pending.popleft()
            self._written, self._at = group.last, group.file

    # --- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                if self._synced_mode and self._pending and time.monotonic() >= self._retry_at:
                    self._write()
                if self._sync() and self._synced_mode:
                    self._on_durable()
        except Exception as error:  # whatever it is, the broker must not wait for this thread any more
            with self._guard:
                self._failure = (
                    str(error) if isinstance(error, JournalError) else f"the journal's thread: {error!r}"
                )
                self._guard.notify_all()
            self._on_durable()

    def _wait(self) -> bool:
        """For a request or the time; False at the end."""
        with self._guard:
            if not self._requested and not self._closing:
                idle = None if not self._pending else RETRY_S
                self._guard.wait(idle if self._synced_mode else self._interval_s)
            self._requested = False
            return not self._closing

    def _sync(self) -> bool:
        """Have the disk take what is written; whether more records are safe by that.

        Raises:
            JournalError: the disk failed. What it did not keep it may report as kept when asked again.
        """
        try:
            with self._syncing:
                return self._sync_files()
        except OSError as error:
            raise JournalError(self._describe(error)) from error

    def _sync_files(self) -> bool:
        with self._guard:
            reached, at, files = self._written, self._at, list(self._open)
        if reached == self._synced and at == self.durable_file:
            return False
        for _, fd in files:  # the older ones first: nothing is on the disk without what comes before it
            os.fdatasync(fd)
        if at != self.durable_file:
            sync_folder(self._folder)
            write_mark(self._lock, at)
            self.durable_file = at
        with self._guard:
            for _, fd in files[:-1]:
                os.close(fd)
            self._open = self._open[len(files) - 1 :]
            rose, self._synced = reached > self._synced, reached
            self._guard.notify_all()
        return rose

    def _describe(self, error: OSError) -> str:
        place = file_name(self._open[-1][0]) if self._open else ""
        return (
            f"{self._folder / place}: {error.strerror}: the disk did not keep what it had taken; start the broker "
            "again, on another disk if this is repeated"
        )
