"""Folder of a cache of weight versions: who uses it, whose turn it is to fetch, which versions it holds.

Locks on files in it keep processes apart. The kernel releases the lock of a process that ends.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from actors.errors import Cancelled
from protocol.errors import WeightsError
from protocol.private_paths import is_own_folder, make_private_folder
from protocol.weights.format import MANIFEST, Base, read_manifest

CACHE_PREFIX = "offbeat-cache-"
"""Prefix of the name of a cache in shared memory. Its users lock a file in it, and remove it themselves."""
KEEP = 2
"""Versions that the cache keeps."""
TURN_S = 900.0
"""Longest wait for a different process of this host that is fetching."""
POLL_S = 0.05
ABANDONED_S = 600.0
"""Time without a change after which a cache that no process has open is removed. Until then its processes may
be about to start again."""
FETCH, USERS, PARTIAL = "fetch.lock", "users.lock", ".partial"
COMPLETE = re.compile(r"e(\d+)-v(\d+)")


class CacheFolder:
    """Folder that all processes of this host in a run share. Folders that nobody uses are removed at first.

    Args:
        path: see `cache_folder`.
        cancelled: set when this process ends. It ends all waits.
    """

    def __init__(self, path: Path, cancelled: threading.Event) -> None:
        self.path, self._cancelled = path, cancelled
        self._users: IO[bytes] | None = None
        _sweep(path.parent, but=path)

    def locate(self, epoch: int, version: int) -> Path:
        """Return the folder of a version. It exists only if the cache holds the whole version."""
        return self.path / f"e{epoch:08d}-v{version:08d}"

    def held(self) -> list[Path]:
        """Return the folders of the whole versions in the cache, newest first."""
        found = [
            (int(match[1]), int(match[2]), path)
            for path in self.path.iterdir()
            if (match := COMPLETE.fullmatch(path.name))
        ]
        return [path for _, _, path in sorted(found, reverse=True)]

    def newest(self) -> Base | None:
        """Return the newest whole version, as the base of a delta; None if there is none."""
        for folder in self.held():
            # A version whose manifest cannot be read is being removed.
            with contextlib.suppress(WeightsError):
                return read_manifest(folder / MANIFEST).as_base
        return None

    def trim(self) -> None:
        """Remove all but the newest versions."""
        for folder in self.held()[KEEP:]:
            _remove(folder)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the fetch lock while the context lasts.

        Raises:
            WeightsError: a different process has held it for `TURN_S`.
            Cancelled: this process ends.
        """
        # Invariant: only the holder of this lock adds versions to the cache or trims them. The kernel
        # releases the lock when its holder ends.
        with open(self.path / FETCH, "ab") as lock:
            deadline = time.monotonic() + TURN_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WeightsError(
                            f"another process of this host has been fetching into {self.path} for more than "
                            f"{TURN_S:g} s; is it stopped?"
                        ) from None
                    if self._cancelled.wait(POLL_S):
                        raise Cancelled from None
            yield

    def enter(self) -> None:
        """Register this process as a user of the cache, so that nobody removes it.

        Raises:
            NameTaken: the cache folder belongs to a different user.
            Cancelled: this process ends.
        """
        # Invariant: a process removes the cache only while it holds the users file exclusively. A shared lock
        # on a users file that is still at its path therefore keeps the cache.
        if self._users is not None and _is_at(self._users, self.path / USERS):
            return
        while True:
            make_private_folder(self.path)
            # These errors mean that the last user is removing the cache: try again.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._users = open(self.path / USERS, "ab")  # noqa: SIM115 (held as long as we use it)
                fcntl.flock(self._users, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if _is_at(self._users, self.path / USERS):
                    return
            if self._cancelled.wait(POLL_S):
                raise Cancelled

    def close(self) -> None:
        """Use the folder no more. The last process of this host that uses it removes it."""
        if self._users is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self._users.close()
        self._users = None


def cache_folder(root: Path, run: str, broker: str) -> Path:
    """Return the cache folder that the processes of this host in a run share.

    Args:
        root: folder that holds the caches of this host.
        run: name of the run.
        broker: endpoint of the broker, which distinguishes runs of the same name.
    """
    digest = hashlib.sha256(f"{broker} {os.geteuid()}".encode()).hexdigest()[:12]
    return root / f"{CACHE_PREFIX}{run}-{digest}"


def _remove(folder: Path) -> None:
    """Rename a folder, so that nobody sees half of it. Delete it in a thread, because that takes time."""
    gone = folder.with_name(f"{folder.name}{PARTIAL}")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(gone)
    threading.Thread(target=shutil.rmtree, args=(gone, True), name="weights removal", daemon=True).start()


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sweep(root: Path, *, but: Path) -> None:
    """Remove the caches that no process has open, and that have not changed for `ABANDONED_S`."""
    for folder in root.glob(f"{CACHE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if (
                folder == but
                or not is_own_folder(folder)
                or time.time() - folder.stat().st_mtime < ABANDONED_S
            ):
                continue
            with open(folder / USERS, "ab") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
