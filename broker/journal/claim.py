"""A journal's folder that one process holds, and the marks in it: up to which byte of which file the journal goes.

A journal that holds less than its marks say has lost something, even if nothing else shows it. There are two kinds:

- what the disk has, after each sync;
- what the operating system has, after each write with `durability` "written", with the id of the machine's present
  boot. A killed process loses none of it, but a power failure may, and after that the id is another one. So a newest
  file that was cut after a kill is told from one that was never longer.

Both are in `lock` and again in `lock.2`, so that one of these files may be lost together with the end of the journal.
"""

import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from broker.errors import JournalError
from protocol.files import sync_folder

log = logging.getLogger(__name__)

LOCK = "lock"
SECOND = "lock.2"
"""The second witness, which says what `LOCK` says."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that is another one after each start of the machine."""
MAX_FILE = (1 << 32) - 1
_TEXT = b"%08d %016d"
_CRC = b" %08x\n"


class Mark(NamedTuple):
    """The newest file that is known to be there from its beginning, and how many of its bytes.

    ``file`` 0: nothing is known. ``nbytes`` 0: the mark of an earlier version, which named the file alone.
    """

    file: int = 0
    nbytes: int = 0

    def bytes_of(self, file: int) -> int:
        """Return how many bytes a file is known to have; 0 if the mark names a different file."""
        return self.nbytes if file == self.file else 0

    def covers(self, file: int, offset: int) -> bool:
        """Return whether the byte at this offset is known to have been there.

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


def pack_written(mark: Mark, boot: bytes) -> bytes:
    """Encode what the operating system has, with the id of the boot in which that holds."""
    text = _TEXT % mark + b" " + boot
    return text + _CRC % crc32(text)


def unpack_written(data: bytes, boot: bytes) -> Mark:
    """Decode what the operating system has. Return `Mark()` if the bytes say nothing, or are of another boot.

    Example:
        >>> line = pack_written(Mark(7, 4096), b"boot-a")
        >>> unpack_written(line, b"boot-a"), unpack_written(line, b"boot-b")
        (Mark(file=7, nbytes=4096), Mark(file=0, nbytes=0))
    """
    line = data.partition(b"\n")[0]
    words = line.split(b" ")
    if not boot or len(words) != 4 or not all(word.isdigit() and len(word) <= 16 for word in words[:2]):
        return Mark()
    mark = Mark(*map(int, words[:2]))
    return mark if pack_written(mark, boot) == line + b"\n" and mark.file <= MAX_FILE else Mark()


MARK_BYTES = len(pack_mark(Mark()))


def boot_id() -> bytes:
    """Return the id of the machine's present boot; b"" if it is not known, and nothing is said of writes then."""
    try:
        return BOOT_ID.read_bytes().strip()[:64]
    except OSError:
        return b""


def read_mark(folder: Path) -> Mark:
    """Read up to where the disk has the journal of a folder. Return `Mark()` if nothing says it.

    Raises:
        JournalError: a file cannot be read.
    """
    return max(unpack_mark(_read(folder / name, MARK_BYTES)) for name in (LOCK, SECOND))


def read_known(folder: Path) -> Mark:
    """Read up to where the journal of a folder is known to go: on the disk, or written since the machine's start.

    Raises:
        JournalError: a file cannot be read.
    """
    boot = boot_id()
    written = (_read(folder / name, 4 * MARK_BYTES)[MARK_BYTES:] for name in (LOCK, SECOND))
    return max(read_mark(folder), *(unpack_written(line, boot) for line in written))


def _read(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a file; none if it is missing."""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from None


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
        self._folder_fd = self._lock = self._second = -1
        self._boot = boot_id()
        self._mark_fails = False
        self._guard = threading.Lock()
        """Lock for the descriptors of the marks, which one thread may replace while another writes."""
        try:
            _make(folder)
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._hold(self._folder_fd)
            self._lock = self._open_lock()
            self._second = self._open_second()
        except OSError as error:
            self.close()
            raise JournalError(
                f"{folder}: {error.strerror}; the broker needs a folder it may write to"
            ) from None
        except JournalError:
            self.close()
            raise

    def _open_mark(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _open_second(self) -> int:
        """Open the second witness; -1 if a full disk has no room for it. It is tried again with each mark."""
        try:
            return self._open_mark(SECOND)
        except OSError as error:
            self._warn(SECOND, error)
            return -1

    def _open_lock(self) -> int:
        fd = self._open_mark(LOCK)
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

    def check_folder(self) -> None:
        """Refuse to go on if the folder's name belongs to a different folder now, or to none.

        Raises:
            JournalError: whatever is written now would be missing for the next broker.
        """
        if not _is(self.folder, self._folder_fd):
            raise JournalError(
                f"{self.folder} was removed or replaced while the broker used it; put the folder back, then start "
                "the broker again"
            )

    def mark_synced(self, mark: Mark, *, sync: bool) -> None:
        """Write how much of the journal the disk has, so that its loss would be noticed.

        The disk may get the mark later than the journal, but never earlier. A mark that cannot be written
        ends nothing: the older mark stays true.
        """
        content, failed = pack_mark(mark), False
        for name in (LOCK, SECOND):
            try:
                fd = self._restored(name)
                _overwrite(fd, content, 0)
                if sync:
                    os.fdatasync(fd)
            except OSError as error:
                self._warn(name, error)
                failed = True
        self._mark_fails = failed

    def mark_written(self, mark: Mark) -> None:
        """Write how much of the journal the operating system has, so that a cut behind a kill would be noticed.

        It costs two writes into memory. The disk need not have them, because they say nothing after the machine's next
        start.
        """
        if not self._boot:
            return
        content = pack_written(mark, self._boot)
        with self._guard:
            for name, fd in ((LOCK, self._lock), (SECOND, self._second)):
                try:
                    _overwrite(fd, content, MARK_BYTES)
                except OSError as error:
                    self._warn(name, error)

    def _warn(self, name: str, error: OSError) -> None:
        if not self._mark_fails:
            log.warning("journal: %s: the mark is not written: %s", self.folder / name, error.strerror)
        self._mark_fails = True

    def _restored(self, name: str) -> int:
        """Return the open file of a mark. Make it again if somebody has deleted or replaced it."""
        fd = self._lock if name == LOCK else self._second
        if fd >= 0 and _is(self.folder / name, fd):
            return fd
        if fd >= 0:
            log.warning(
                "journal: %s was removed while the broker used it; it is made again", self.folder / name
            )
        new = self._open_lock() if name == LOCK else self._open_mark(name)
        with self._guard:
            if name == LOCK:
                self._lock = new
            else:
                self._second = new
            if fd >= 0:
                os.close(fd)
        sync_folder(self.folder)
        return new

    def close(self) -> None:
        """Unlock the folder. A second call does nothing."""
        for fd in (self._second, self._lock, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._second = self._lock = self._folder_fd = -1


def _overwrite(fd: int, content: bytes, offset: int) -> None:
    if os.pwrite(fd, content, offset) < len(content):
        raise OSError(0, "written in part")


def _make(folder: Path) -> None:
    """Make a folder and its parents, and sync their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    # Names and sizes of its files are nobody else's business.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The folder's name is synced in any case: the process that made it may have been killed before it could.
    for path in reversed(missing or [folder]):
        sync_folder(path.parent)


def _is(path: Path, fd: int) -> bool:
    """Return whether a path names the open file or folder."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
