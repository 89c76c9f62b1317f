"""Processes of one host: none outlives the process that started it, and a lock says who may use a shared GPU."""

import asyncio
import ctypes
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of an event loop that does not run, let them clean up, and close it.

    Example:
        >>> loop = asyncio.new_event_loop()
        >>> task = loop.create_task(asyncio.sleep(60))
        >>> end_loop(loop)
        >>> task.cancelled(), loop.is_closed()
        (True, True)
    """
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    # Connections that they closed are let go in the step after.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


class EarlySigterm:
    """Handles SIGTERM before an event loop has a handler of its own: the process ends at once, until `hold`.

    Example:
        >>> before = signal.getsignal(signal.SIGTERM)
        >>> early = EarlySigterm()
        >>> early.hold()
        >>> signal.raise_signal(signal.SIGTERM)
        >>> early.came
        True
        >>> _ = signal.signal(signal.SIGTERM, before)
    """

    def __init__(self) -> None:
        self.came = False
        """True if the signal came. Code that catches everything, such as an environment's, catches the exit too."""
        signal.signal(signal.SIGTERM, self._end)

    def hold(self) -> None:
        """Note the signal from now on, and do not end the process.

        An exit can come at any line. While `asyncio.run` begins, it may take the step of a task with it, and the loop
        waits for this task at its end, for ever. Between the making of a ZeroMQ socket and its entry in the context's
        list it leaves a socket that nobody closes, and the context waits for that, for ever.
        """
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self.came = True

    def _end(self, *_: object) -> None:
        self.came = True
        sys.exit(0)


SUPERVISED = "OFFBEAT_SUPERVISED"
"""Environment variable with what a host's supervisor says of itself and of earlier processes of this name, as JSON."""
MAX_TOLD = 1_000


@dataclass(frozen=True)
class Supervised:
    """What a process tells the broker of its supervisor, in its Hello."""

    host: str = ""
    """Name of the host in its ticket; "": there is no supervisor, or it is the one beside the learner."""
    job: str = ""
    """Name of the job that the host's engine has given it."""
    restarts: int = 0
    """Starts of this process before, under this supervisor."""
    died: str = ""
    """How the one before ended, with the last lines of its log."""
    digest: str = ""
    """Digest of the run: of a host's ticket, or for the broker of the run itself."""


def supervised(environment: Mapping[str, str]) -> Supervised:
    """Read what the supervisor says; nothing if it says nothing that can be read.

    Example:
        >>> supervised({SUPERVISED: '{"host": "gpu7", "restarts": 2}'})
        Supervised(host='gpu7', job='', restarts=2, died='', digest='')
        >>> supervised({SUPERVISED: "["}) == supervised({}) == Supervised()
        True
    """
    try:
        told = json.loads(environment.get(SUPERVISED, "{}"))
        return Supervised(
            host=str(told.get("host", ""))[:200],
            job=str(told.get("job", ""))[:200],
            restarts=max(0, int(told.get("restarts", 0))),
            died=str(told.get("died", ""))[:MAX_TOLD],
            digest=str(told.get("digest", ""))[:200],
        )
    except (ValueError, TypeError, AttributeError):
        return Supervised()


VARIABLE = "OFFBEAT_GPU_LOCK"
"""Environment variable with the folder of the lock. Processes without it share no GPU in this way."""
HELD, WANTED = "held.lock", "wanted.lock"
LOOK_S = 0.01
"""Time between two looks at the lock."""


class GpuLock:
    """One process's view of the lock.

    Args:
        folder: folder of the lock files; it is made.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> learner, generator = GpuLock(folder), GpuLock(folder)
        >>> generator.take_together(), learner.take_alone()
        (True, False)
        >>> generator.release()
        >>> learner.take_alone(), generator.take_together()
        (True, False)
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._held, self._wanted = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in (HELD, WANTED)
        )

    def take_together(self) -> bool:
        """Take the lock beside others that take it together, unless somebody wants it alone.

        Returns:
            Whether this process holds it now.
        """
        return not self.wanted_alone() and _locked(self._held, fcntl.LOCK_SH)

    def take_alone(self) -> bool:
        """Take the lock alone. Return whether this process holds it now."""
        return _locked(self._held, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock; nothing happens if this process does not hold it."""
        fcntl.flock(self._held, fcntl.LOCK_UN)

    def wanted_alone(self) -> bool:
        """Return whether somebody waits until the lock is free for it alone."""
        if _locked(self._wanted, fcntl.LOCK_SH):
            fcntl.flock(self._wanted, fcntl.LOCK_UN)
            return False
        return True

    def wait_alone(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> float:
        """Wait until this process holds the lock alone. Return the seconds that it took.

        Raises:
            TimeoutError: others held it for ``timeout_s``.
        """
        began = clock()
        try:
            while not self.take_alone():
                # It fails while a different process looks at it in `wanted_alone`, so it is tried at every look.
                _locked(self._wanted, fcntl.LOCK_EX)
                if clock() - began > timeout_s:
                    raise TimeoutError
                sleep(LOOK_S)
        finally:
            fcntl.flock(self._wanted, fcntl.LOCK_UN)
        return clock() - began

    def close(self) -> None:
        """Close the files, which releases everything."""
        os.close(self._held)
        os.close(self._wanted)


def lock_of_environment() -> GpuLock | None:
    """Return the lock that this process takes part in; None if it takes part in none."""
    folder = os.environ.get(VARIABLE)
    return GpuLock(Path(folder)) if folder else None


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
