"""Folder of the sockets between an engine and its workers, which vLLM leaves in the folder of temporary files."""

import atexit
import os
import tempfile
from pathlib import Path

from protocol.files import HeldFolder, remove_left_behind

PREFIX = "offbeat-engine-"
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
    remove_left_behind(root, PREFIX)
    if len(os.fsencode(root)) + len(PREFIX) + 9 > LONGEST:
        return None
    folder = HeldFolder(root, PREFIX)
    # A process that is killed leaves it to the next one.
    atexit.register(folder.remove)
    return folder.path
