"""Faults of weights: data that the learner did not publish, and shared memory without room for a version."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from learner.run_files import SHARED_MEMORY, weights_folder
from protocol.weights.format import DATA
from tests.campaigns.faults.scene import Fault, Scene

REFUSED = b"weight update refused"
NEXT_VERSION_S = 60.0
STILL_S, LOOKED_S = 2.0, 3.0
"""Seconds that processes are stopped at most. The supervisor does not notice such short stops."""
TRIES = 10
PIECE = 1 << 20

Damage = Callable[[Path, Path, random.Random], None]
"""Function that damages a version's folder. It also gets the folder of the version before."""


def damage_weights(damage: Damage) -> Fault:
    """Return a fault that damages the next version that the generators load.

    The generators are stopped until the version is damaged, and the learner until the generators have checked
    it. A generator has to refuse the version, and sample on with the weights it has.
    """

    def inject(scene: Scene) -> None:
        system, folder = scene.system, weights_folder(scene.system.folder)
        system.until(lambda: len(_versions(folder)) > 1, NEXT_VERSION_S, "two versions")
        before = _refusals(system.folder)
        for _ in range(TRIES):
            generators = [system.pid(name) for name in system.generators()]
            newest = _newest(folder)
            with stopped(*generators):
                if _within(STILL_S, lambda known=newest: _newest(folder) > known):  # type: ignore[misc]
                    with stopped(system.pid("learner")):
                        for version in [folder / name for name in _versions(folder) if name > newest]:
                            _replace(version, _before(version), damage, scene.rng)
                        wake(*generators)
                        _within(LOOKED_S, lambda: _refusals(system.folder) > before)
            # If no version came, the learner waits for samples. Let the generators run, and look once more.
            if _within(LOOKED_S, lambda: _refusals(system.folder) > before):
                return
        raise AssertionError(f"in {TRIES} tries no generator refused anything")

    return inject


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes (SIGSTOP) within the `with` block, and continue them (SIGCONT) at its end."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        wake(*pids)


def wake(*pids: int) -> None:
    """Continue processes (SIGCONT), if they still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _refusals(run: Path) -> int:
    return sum(path.read_bytes().count(REFUSED) for path in (run / "logs").glob("generator*.log"))


def _versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("v*") if path.name[1:].isdigit())


def _newest(folder: Path) -> str:
    return max(_versions(folder), default="")


def _before(version: Path) -> Path:
    """Return the folder of the version before, which has to be kept still."""
    older = [name for name in _versions(version.parent) if name < version.name]
    assert older, f"{version.name} is the only version kept"
    return version.with_name(older[-1])


def _replace(version: Path, older: Path, damage: Damage, rng: random.Random) -> None:
    """Replace a version's folder by a damaged copy under the same name. The original files do not change."""
    copy, removed = version.with_name("damaged"), version.with_name("removed")
    try:
        shutil.copytree(version, copy)
        damage(copy, older, rng)
        version.rename(removed)
        copy.rename(version)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(removed, ignore_errors=True)


def truncated(version: Path, older: Path, rng: random.Random) -> None:
    """Cut off half of the data."""
    os.truncate(version / DATA, (version / DATA).stat().st_size // 2)


def flipped(version: Path, older: Path, rng: random.Random) -> None:
    """Flip one bit of the data."""
    with open(version / DATA, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(rng.randrange(size // 2, size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def replaced(version: Path, older: Path, rng: random.Random) -> None:
    """Put a whole older version under the name of this one."""
    shutil.rmtree(version)
    shutil.copytree(older, version)


def mixed(version: Path, older: Path, rng: random.Random) -> None:
    """Put an older version's data under the manifest of this one."""
    shutil.copyfile(older / DATA, version / DATA)


def fill_memory(seconds: float = 5.0) -> Fault:
    """Return a fault that fills shared memory for a while. The campaign has its own mount of it."""

    def inject(scene: Scene) -> None:
        with full(SHARED_MEMORY / "ballast", leave=0):
            time.sleep(seconds)

    return inject


@contextmanager
def full(ballast: Path, leave: int) -> Iterator[None]:
    """Fill a file system within the `with` block, except for ``leave`` bytes."""
    try:
        # Other processes write meanwhile, so the last allocation may fail.
        with open(ballast, "wb") as file, contextlib.suppress(OSError):
            while (free := _free(ballast.parent) - leave) > 0:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(free, PIECE))
        yield
    finally:
        ballast.unlink(missing_ok=True)


def _free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize
