"""Folder of the sockets between an engine and its workers, which vLLM leaves in the folder of temporary files."""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from protocol.files import is_own_folder

PREFIX = "offbeat-engine-"
YOUNG_S = 60.0
"""A folder that was made so lately may not be locked yet."""
LONGEST = 107 - 37
"""Most bytes of the folder's path: a socket's whole path has at most 107, and vLLM adds "/" and 36 characters."""


def make_socket_folder(root: Path | None = None) -> Path | None:
    """Return a new folder that this process locks until it ends, and remove those of processes that have ended.

    Whatever this process is replaced by (``exec``) keeps the lock.

    Args:
        root: folder of temporary files; None: that of this process.

    Returns:
        The folder; None if its path would be too long for a socket.
    """
    root = Path(tempfile.gettempdir()) if root is None else root
    for path in root.glob(f"{PREFIX}*"):
        if is_own_folder(path) and time.time() - path.stat().st_mtime > YOUNG_S and _locked(path, keep=False):
            shutil.rmtree(path, ignore_errors=True)
    if len(os.fsencode(root)) + len(PREFIX) + 9 > LONGEST:
        return None
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    _locked(folder, keep=True)
    # A process that is killed leaves it to the next one.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _locked(folder: Path, *, keep: bool) -> bool:
    """Take the lock of a folder, and keep it or give it back. Return False if another process has it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        if keep:
            os.set_inheritable(descriptor, True)
        else:
            os.close(descriptor)
        return True
    return False
