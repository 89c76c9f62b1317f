"""A journal's folder that one process holds, and the mark that the process writes in it."""

import fcntl
import logging
import os
from pathlib import Path

from broker.errors import JournalError
from broker.journal.mark import LOCK, Mark, pack_mark
from protocol.whole_files import sync_folder

log = logging.getLogger(__name__)


class Claim:
    """The right to write to a journal's folder. Only one process at a time has it.

    The lock is on the folder itself, because somebody may delete the file `lock`. The file is locked, too: it
    is what earlier versions lock.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder, and make it if it is missing.

        Raises:
            JournalError: another process has the lock, or the folder cannot be made.
        """
        self.folder = folder
        self._folder_fd = self._lock = -1
        self._mark_fails = False
        try:
            _make(folder)
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._hold(self._folder_fd)
            self._lock = self._open_lock()
        except OSError as error:
            self.close()
            raise JournalError(
                f"{folder}: {error.strerror}; the broker needs a folder it may write to"
            ) from None
        except JournalError:
            self.close()
            raise

    def _open_lock(self) -> int:
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._hold(fd)
        except JournalError:
            os.close(fd)
            raise
        return fd

    def _hold(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{self.folder} is in use by another broker; end that first") from None
        except OSError as error:
            # Some network file systems lock files, but no folders.
            if fd != self._folder_fd:
                raise JournalError(
                    f"{self.folder}: {error.strerror}: it cannot be locked; put the run folder on a local disk"
                ) from None

    def check(self) -> None:
        """Refuse to go on if the folder's name belongs to a different folder now, or to none.

        Raises:
            JournalError: whatever is written now would be missing for the next broker.
        """
        if not _is(self.folder, self._folder_fd):
            raise JournalError(
                f"{self.folder} was removed or replaced while the broker used it; put the folder back, then start "
                "the broker again"
            )

    def mark(self, mark: Mark, *, sync: bool) -> None:
        """Write how much of the journal the disk has, so that its loss would be noticed.

        The disk may get the mark later than the journal, but never earlier. A mark that cannot be written
        ends nothing: the older mark stays true.
        """
        content = pack_mark(mark)
        try:
            self._restore_lock()
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

    def _restore_lock(self) -> None:
        """Make the file `lock` again if somebody has deleted or replaced it."""
        if _is(self.folder / LOCK, self._lock):
            return
        log.warning("journal: %s was removed while the broker used it; it is made again", self.folder / LOCK)
        fd = self._open_lock()
        os.close(self._lock)
        self._lock = fd
        sync_folder(self.folder)

    def close(self) -> None:
        """Unlock the folder. A second call does nothing."""
        for fd in (self._lock, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self._folder_fd = -1


def _make(folder: Path) -> None:
    """Make a folder and its parents, and sync their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # The folder's name is synced in any case: the process that made it may have been killed before it could.
    for path in reversed(missing or [folder]):
        sync_folder(path.parent)


def _is(path: Path, fd: int) -> bool:
    """Return whether a path names the open file or folder."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
