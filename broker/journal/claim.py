"""A journal's folder that one process holds, and the mark in it: up to which byte of which file the disk has it.

A journal that holds less than its mark says has lost something, even if nothing else shows it.
"""

import fcntl
import logging
import os
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from broker.errors import JournalError
from protocol.files import sync_folder

LOCK = "lock"
MAX_FILE = (1 << 32) - 1
_TEXT = b"%08d %016d"
_CRC = b" %08x\n"


class Mark(NamedTuple):
    """The newest file that the disk has from its beginning, and how many of its bytes.

    ``file`` 0: nothing is known. ``nbytes`` 0: the mark of an earlier version, which named the file alone.
    """

    file: int = 0
    nbytes: int = 0

    def bytes_of(self, file: int) -> int:
        """Return how many bytes of a file the disk is known to have; 0 if the mark names a different file."""
        return self.nbytes if file == self.file else 0

    def covers(self, file: int, offset: int) -> bool:
        """Return whether the disk is known to have had the byte at this offset.

        Example:
            >>> mark = Mark(2, 100)
            >>> mark.covers(1, 5000), mark.covers(2, 99), mark.covers(2, 100), mark.covers(3, 0)
            (True, True, False, False)
        """
        return file < self.file or (file == self.file and offset < max(self.nbytes, 1))


def pack_mark(mark: Mark) -> bytes:
    """Encode a mark. All marks have the same length, so that a new one replaces the old one in place."""
    text = _TEXT % mark
    return text + _CRC % crc32(text)


def unpack_mark(data: bytes) -> Mark:
    """Decode a mark, also one of an earlier version. Return `Mark()` if the bytes are no mark.

    Example:
        >>> unpack_mark(pack_mark(Mark(7, 4096))), unpack_mark(b"00000007\\n"), unpack_mark(b"junk")
        (Mark(file=7, nbytes=4096), Mark(file=7, nbytes=0), Mark(file=0, nbytes=0))
    """
    line = data[: len(pack_mark(Mark()))].partition(b"\n")[0].strip()
    words = line.split(b" ")
    # A longer text is no number of a file, and Python refuses to convert a very long one.
    if not all(word.isdigit() and len(word) <= 16 for word in words[:2]):
        return Mark()
    mark = Mark(*map(int, words[:2]))
    if len(words) > 1 and pack_mark(mark) != line + b"\n":
        return Mark()
    return mark if mark.file <= MAX_FILE else Mark()


def read_mark(folder: Path) -> Mark:
    """Read the mark of a journal's folder. Return `Mark()` if there is none.

    Raises:
        JournalError: the file cannot be read.
    """
    try:
        with open(folder / LOCK, "rb") as file:
            return unpack_mark(file.read(64))
    except (FileNotFoundError, NotADirectoryError):
        return Mark()
    except OSError as error:
        raise JournalError(f"{folder / LOCK}: {error.strerror}") from None


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
