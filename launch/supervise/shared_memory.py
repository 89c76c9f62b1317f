"""Folders in shared memory: marks their owner, and removes folders whose owner was killed.

A run's weights lie in ``offbeat-NAME-DIGEST``. `offbeat train` locks the file ``offbeat-NAME-DIGEST.owner``
beside it for as long as it lives. The kernel releases the lock when the process ends, for whatever reason, so
a folder whose lock is free belongs to nobody. This holds even between containers that share the memory but do
not see each other's processes. Generators stage versions in ``offbeat-stage-RUN-GENERATOR-PID``.
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
from protocol.files import open_private_file

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
    try:
        descriptor = open_private_file(path)
    except NameTaken as error:
        raise ConfigError(str(error)) from None
    with open(descriptor, "w") as owner:
        _lock(owner, path)
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
    kept = {path.name.removesuffix(OWNER) for path in root.glob(f"offbeat-*{OWNER}") if _held(path)}
    left = [path for path in root.glob("offbeat-*") if _removable(path) and _ownerless(path, kept, now)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
        _unlink(path.with_name(path.name + OWNER))
    for path in root.glob(f"offbeat-*{OWNER}"):
        if path.name.removesuffix(OWNER) not in kept:
            _unlink(path)
    return left


def _unlink(owner: Path) -> None:
    # In a folder for all users, only its owner may remove a name.
    with contextlib.suppress(OSError):
        owner.unlink()


def _ownerless(path: Path, kept: set[str], now: float) -> bool:
    """Return whether no living process owns a folder, as far as this process can see."""
    if path.name.startswith(STAGE_PREFIX):
        run_and_generator, _, pid = path.name.removeprefix(STAGE_PREFIX).rpartition("-")
        of_living_run = any(run_and_generator.startswith(f"{_run(name)}-") for name in kept)
        return pid.isdecimal() and not of_living_run and not Path("/proc", pid).exists()
    if path.name in kept or path.name.startswith(CACHE_PREFIX):
        return False
    return path.with_name(path.name + OWNER).exists() or now - _changed(path) > UNOWNED_S


def _removable(path: Path) -> bool:
    """Return whether this is a folder that this process may remove: its user's own, or anybody's for root."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and os.geteuid() in (0, found.st_uid)


def _run(name: str) -> str:
    """Return the name of the run in ``offbeat-NAME-DIGEST``."""
    return name.removeprefix("offbeat-").rpartition("-")[0]


def _changed(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _lock(owner: IO[str], path: Path) -> None:
    """Take the lock, with retries for `LOCK_S`.

    Raises:
        ConfigError: another process holds the lock.
    """
    # Invariant: `_held` takes the lock for a moment to test it, so one failure does not prove an owner.
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{path} is held by another process; another run has the same folder"
                ) from None
            time.sleep(0.01)


def _held(owner: Path) -> bool:
    try:
        # A different user may have put a link or a pipe here, which must not be followed or waited for.
        with open(os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
