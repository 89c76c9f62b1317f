"""Folders in shared memory: marks their owner, and removes folders whose owner was killed.

A run's weights lie in ``offbeat-NAME-DIGEST``. `offbeat train` locks the file ``offbeat-NAME-DIGEST.owner``
beside it for as long as it lives. The kernel releases the lock when the process ends, for whatever reason, so
a folder whose lock is free belongs to nobody. This holds even between containers that share the memory but do
not see each other's processes. Generators stage versions in ``offbeat-stage-RUN-GENERATOR-...``, which they lock
themselves.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from actors.generator.weights.cache import CACHE_PREFIX
from actors.generator.weights.staging import STAGE_PREFIX
from launch.errors import ConfigError
from learner.run_files import SHARED_MEMORY, weights_folder
from protocol.errors import NameTaken
from protocol.files import is_at, left_behind, lock_if_free, open_private_file

OWNER = ".owner"
LOCK_S = 5.0
UNOWNED_S = 24 * 3600.0
"""Age without a change after which a folder that has no ``.owner`` file is removed. A learner that was
started by hand has no such file."""


@contextlib.contextmanager
def hold_folder(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder in shared memory for this process. The folder need not exist yet.

    Raises:
        ConfigError: another process holds the folder, or a different user has its name.
    """
    folder = weights_folder(run_dir)
    if folder.parent != SHARED_MEMORY:
        yield
        return
    path = folder.with_name(folder.name + OWNER)
    with _locked(path) as owner:
        owner.truncate()
        owner.write(str(run_dir.resolve()))
        owner.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def sweep(root: Path = SHARED_MEMORY, *, now: float | None = None) -> list[Path]:
    """Remove what killed processes have left in shared memory. Return the folders that were removed.

    Args:
        now: seconds of the wall clock, which the times of files are compared with.
    """
    if not os.access(root, os.W_OK):
        return []
    now = time.time() if now is None else now
    removed = [path for path in root.glob("offbeat-*") if _removable(path) and _remove_left(path, now)]
    for owner in root.glob(f"offbeat-*{OWNER}"):
        with lock_if_free(owner) as free:
            if free and not owner.with_name(owner.name.removesuffix(OWNER)).exists():
                _unlink(owner)
    return removed


def _remove_left(path: Path, now: float) -> bool:
    """Remove a folder that no living process has. Return whether it was one."""
    if path.name.startswith(CACHE_PREFIX):
        return False
    if path.name.startswith(STAGE_PREFIX):
        if left := left_behind(path, now=now):
            shutil.rmtree(path, ignore_errors=True)
        return left
    owner = path.with_name(path.name + OWNER)
    # A run of this folder that starts meanwhile waits for the lock.
    with lock_if_free(owner) as free:
        if free is False or (free is None and now - _changed(path) <= UNOWNED_S):
            return False
        shutil.rmtree(path, ignore_errors=True)
        _unlink(owner)
        return True


def _unlink(owner: Path) -> None:
    # In a folder for all users, only its owner may remove a name.
    with contextlib.suppress(OSError):
        owner.unlink(missing_ok=True)


def _removable(path: Path) -> bool:
    """Return whether this is a folder that this process may remove: its user's own, or anybody's for root."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and os.geteuid() in (0, found.st_uid)


def _changed(folder: Path) -> float:
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _locked(path: Path) -> IO[str]:
    """Return the file, opened and locked. Retries for `LOCK_S`.

    Raises:
        ConfigError: another process holds the lock, or a different user has the name.
    """
    # Invariant: `sweep` takes the lock for a moment, so one failure does not prove an owner.
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            owner = open(open_private_file(path), "w", encoding="utf-8")  # noqa: SIM115
        except NameTaken as error:
            raise ConfigError(str(error)) from None
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(owner, path):
                return owner
        except BlockingIOError:
            pass
        owner.close()
        if time.monotonic() > deadline:
            raise ConfigError(f"{path} is held by another process; another run has the same folder")
        time.sleep(0.01)
