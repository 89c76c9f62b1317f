"""What faults need of the host: a second network namespace, and file systems to fill."""

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.network import make_network, remove_network
from learner.run_files import SHARED_MEMORY

NEEDS_NETWORK = ("network cut", "network cut one way", "network slow")
NEEDS_TMPFS = ("disk low", "disk full")
NEEDS_MEMORY = ("shared memory full",)
NEEDS_WIRE = ("bits flipped", "bytes swapped", "connection reset", "wire delayed", "connection replayed")
TMPFS_BYTES, MEMORY_BYTES = 3 << 30, 1 << 30
CLONE_NEWNS = 0x0002_0000


@contextmanager
def stage(directory: Path, kinds: list[str]) -> Iterator[None]:
    """Set up what these kinds need: a wire to a second network namespace, and file systems to fill.

    Only this process and its children see the mounted file systems.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if needs(kinds, NEEDS_TMPFS + NEEDS_MEMORY):
        own_mounts()
    if needs(kinds, NEEDS_TMPFS):
        _mount_tmpfs(directory, TMPFS_BYTES)
    if needs(kinds, NEEDS_MEMORY):
        _mount_tmpfs(SHARED_MEMORY, MEMORY_BYTES)
    if needs(kinds, NEEDS_NETWORK):
        make_network()
    try:
        yield
    finally:
        if needs(kinds, NEEDS_NETWORK):
            remove_network()


def needs(kinds: list[str], of: tuple[str, ...]) -> bool:
    """Return whether any of ``kinds`` is in ``of``."""
    return any(kind in of for kind in kinds)


def own_mounts() -> None:
    """Enter a mount namespace of our own: only this process and its children see later mounts.

    The mounts end with these processes.

    Raises:
        OSError: the process is not allowed to, for example because it does not run as root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(
            ctypes.get_errno(), "mounts of our own: run as root, or leave out what fills file systems"
        )
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _mount_tmpfs(folder: Path, nbytes: int) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "offbeat-faults", str(folder)], check=True
    )
