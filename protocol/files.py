"""Files that are there as a whole or not at all; and private ones in shared memory, where others make names, too."""

import fcntl
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from protocol.errors import NameTaken

YOUNG_S = 60.0
"""A held folder that was changed so lately may not be locked yet."""


@contextmanager
def locked_file(
    path: Path, *, timeout_s: float, pause: Callable[[], object], late: Callable[[], Exception]
) -> Iterator[None]:
    """Hold the lock of a file while the context lasts. The kernel releases it when its holder ends.

    Args:
        path: file of the lock, which is made if it is not there.
        timeout_s: longest wait for another process that holds it.
        pause: waits a moment between two looks. It may end the wait by an error.
        late: makes the error that is raised after ``timeout_s``.

    Example:
        >>> import tempfile
        >>> lock = Path(tempfile.mkdtemp()) / "lock"
        >>> take = lambda: locked_file(lock, timeout_s=0.0, pause=lambda: None, late=lambda: OSError("late"))
        >>> with take(), take():
        ...     pass
        Traceback (most recent call last):
        ...
        OSError: late
        >>> with take():
        ...     pass
    """
    with open(path, "ab") as lock:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise late() from None
            pause()
        yield


def write_whole(
    path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = True, shared: bool = False
) -> None:
    """Write or replace a file.

    Args:
        content: text is written as UTF-8.
        mode: permissions of the new file, less the process's umask.
        durable: sync the content and the name to the disk.
        shared: several processes may write this file at the same time.

    Raises:
        OSError: the file could not be written; the old file is unchanged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "epoch"
        >>> write_whole(path, "3")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('3', ['epoch'])
    """
    with whole_file(path, durable=durable, shared=shared) as partial:
        # O_EXCL, so that an existing file or link of this name is never written to.
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to the file's name when the block ends.

    If the block ends with an exception, the temporary file is removed.

    Args:
        durable: sync the content and the name to the disk.
        shared: several processes may write this file at the same time.
    """
    unique = f"-{os.getpid()}-{secrets.token_hex(4)}" if shared else ""
    partial = path.with_name(f"{path.name}.partial{unique}")
    try:
        yield partial
        if durable:
            sync_file(partial)
        partial.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Sync the content of a file to the disk; the content of a folder is the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""Sync names that were created or changed in a folder to the disk."""


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter. An existing folder has to be this user's.

    Raises:
        NameTaken: the name is a link, a file, or a folder of a different user.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "offbeat-run"
        >>> make_private_folder(folder), is_own_folder(folder)
        (None, True)
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not is_own_folder(folder):
            raise taken(folder) from None


def is_own_folder(path: Path) -> bool:
    """Return whether this is a folder of this user, and no link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def open_private_file(path: Path) -> int:
    """Open a file of this user for reading and writing, or make it. Return its descriptor. It keeps its content.

    Raises:
        NameTaken: the name is a link, no regular file, has a second name, or belongs to a different user.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            # Its owner has removed it in between.
            continue
        except OSError:
            raise taken(path) from None
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
        raise taken(path)


class HeldFolder:
    """New folder of this user alone, which this process holds until it ends.

    The kernel releases it then, for whatever reason. So it is known to be left behind also between containers that
    share a folder and do not see each other's processes. What replaces this process by ``exec`` goes on to hold it.

    Args:
        root: folder to make it in.
        prefix: beginning of its name.

    Example:
        >>> held = HeldFolder(Path(tempfile.mkdtemp()), "stage-")
        >>> held.path.is_dir(), left_behind(held.path, now=time.time() + 2 * YOUNG_S)
        (True, False)
        >>> held.remove()
        >>> held.path.exists()
        False
    """

    def __init__(self, root: Path, prefix: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.set_inheritable(self._lock, True)

    def remove(self) -> None:
        """Remove the folder with all that is in it. It may be removed again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def left_behind(folder: Path, *, now: float) -> bool:
    """Return whether every process that held a `HeldFolder` has ended.

    Args:
        now: seconds of the wall clock.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return now - os.fstat(descriptor).st_mtime > YOUNG_S
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove_left_behind(root: Path, prefix: str) -> None:
    """Remove this user's folders of a prefix that were left behind."""
    for folder in root.glob(f"{prefix}*"):
        if is_own_folder(folder) and left_behind(folder, now=time.time()):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lock_if_free(path: Path) -> Iterator[bool | None]:
    """Hold the lock of a file while the context lasts, if no process has it. The file is not made.

    Yields:
        Whether the lock was free; None if there is no such file, or one that this process may not read.

    Example:
        >>> lock = Path(tempfile.mkdtemp()) / "lock"
        >>> def free():
        ...     with lock_if_free(lock) as found:
        ...         return found
        >>> free()
        >>> take = lambda: locked_file(lock, timeout_s=0.0, pause=lambda: None, late=lambda: OSError("late"))
        >>> with take():
        ...     free()
        False
        >>> free()
        True
    """
    try:
        # Another user may have put a link or a pipe here, which must not be followed or waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            yield None
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        # Its last holder may have removed it in between.
        yield True if is_at(file, path) else None


def is_at(file: IO[Any], path: Path) -> bool:
    """Return whether an open file still has its name. Whoever locks one asks this, because its holder may remove it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def taken(path: Path) -> NameTaken:
    """Return the error that says who has a name."""
    try:
        found = path.lstat()
    except OSError:
        return NameTaken(f"{path} cannot be made; another process keeps taking the name")
    kind = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
    what = kind.get(stat.S_IFMT(found.st_mode), "a special file")
    return NameTaken(
        f"{path} is {what} of user {_name(found.st_uid)}, and this process is of user {_name(os.geteuid())}; "
        "have it removed, or give the run folder a different name"
    )


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
