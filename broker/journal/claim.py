"""A journal's folder that one process holds, and the mark that the process writes in it."""

import fcntl
import logging
import os
from pathlib import Path

from broker.errors import JournalError
from broker.journal.mark import LOCK, Mark, pack_mark

log = logging.getLogger(__name__)


class Claim:
    """The right to write to a journal's folder. Only one process at a time has it."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder, and make it if it is missing.

        Raises:
            JournalError: another process has the lock, or the folder cannot be made.
        """
        self.folder = folder
        self._mark_fails = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(
                f"{folder}: {error.strerror}; the broker needs a folder it may write to"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise JournalError(f"{folder} is in use by another broker; end that first") from None

    def mark(self, mark: Mark, *, sync: bool) -> None:
        """Write how much of the journal the disk has, so that its loss would be noticed.

        The disk may get the mark later than the journal, but never earlier. A mark that cannot be written
        ends nothing: the older mark stays true.
        """
        content = pack_mark(mark)
        try:
            if os.pwrite(self._lock, content, 0) < len(content):
                raise OSError(0, "written in part")
            if sync:
                os.fdatasync(self._lock)
        except OSError as error:
            if not self._mark_fails:
                log.warning("journal: %s: the mark is not written: %s", self.folder / LOCK, error.strerror)
            self._mark_fails = True
        else:
            self._mark_fails = False

    def close(self) -> None:
        """Unlock the folder. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
