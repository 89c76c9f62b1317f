"""Files and folders in shared memory, where every user of the machine may make a name first.

Offbeat's names there can be guessed, for example from the path of a run folder. So a name is made in a way that
follows no link, or it has to be this user's already.
"""

import os
import pwd
import stat
from pathlib import Path

from protocol.errors import NameTaken


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
