"""A process must not outlive the process that started it, not even if that one is killed."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded at import, because nothing may be imported between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int = 0) -> None:
    """Ask Linux to SIGKILL this process when the thread that started it ends; do nothing on other systems.

    Args:
        parent: process id of the parent, which may be dead already. 0 means the parent process that
            `multiprocessing` knows, if there is one.

    Raises:
        OSError: the kernel refused the request.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not parent:
        started_by = multiprocessing.parent_process()
        parent = (started_by.pid or 0) if started_by is not None else 0
    # The parent may have died before the request.
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
