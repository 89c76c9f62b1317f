"""Groups of records on their way to the disk, in order.

A group of records counts as written only when all of its bytes are.
"""

import os
import threading
from collections import deque
from dataclasses import dataclass

from protocol.codec import Buffer

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
