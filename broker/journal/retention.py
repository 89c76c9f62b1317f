"""Delete files of the journal that hold nothing needed, oldest first, while the journal is too large."""

import logging
from collections.abc import Iterable
from pathlib import Path

from broker.journal.opening import finish_release, forget_released, release
from broker.journal.writer import Writer

log = logging.getLogger(__name__)

MAX_FORGOTTEN = 8
"""Upper limit of the files of deleted files that are removed at a time, because each removal is synced."""


class Retention:
    """One deletion at a time: it is asked for, and done when the disk has what makes the files needless.

    Args:
        keep_bytes: bytes of the journal up to which nothing is deleted.
        files: bytes of each file by number. The journal adds files; a deletion removes them.
        released: numbers of files that were deleted and still have an empty file that stands for them.
    """

    def __init__(
        self, folder: Path, keep_bytes: int, files: dict[int, int], released: list[int], writer: Writer
    ) -> None:
        self._folder, self._keep_bytes, self._writer = folder, keep_bytes, writer
        self._files, self._released = files, released
        self._needed: set[int] = set()
        self._below = self._at = 0
        """The files below `_below` may go once the disk has `_at` records; 0: no deletion is pending."""

    @property
    def pending(self) -> bool:
        """Whether a deletion was asked for and is not done."""
        return self._below > 0

    def ask(self, needed: Iterable[int], below: int) -> None:
        """Ask to delete files with a number under ``below`` that are not needed.

        While a deletion is pending this does nothing, because it would only postpone that one.
        """
        if not self.pending:
            self._needed, self._below, self._at = set(needed), below, self._writer.count

    def work(self) -> list[int]:
        """Do the pending deletion if the disk has what it rests on; return the numbers of the deleted files."""
        ready = self._writer.durable_file >= self._below and self._writer.synced >= self._at
        gone = list[int]()
        if not self.pending or not ready:
            return gone
        below, self._below = self._below, 0
        try:
            for number in sorted(number for number in self._files if number < below):
                if sum(self._files.values()) <= self._keep_bytes:
                    break
                if number not in self._needed:
                    release(self._folder, number)
                    del self._files[number]
                    gone.append(number)
                    self._released.append(number)
            if gone:
                finish_release(self._folder, gone)
            self._forget()
        except OSError as error:
            log.warning("journal: files that nothing needs are not deleted: %s", error)
        return gone

    def _forget(self) -> None:
        below = sorted(number for number in self._released if number < min(self._files))
        # The empty file with the highest number stands for all deleted files before it.
        for number in below[:-1][:MAX_FORGOTTEN]:
            forget_released(self._folder, number)
            self._released.remove(number)
