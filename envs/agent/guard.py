"""Starts an agent's command in a process group of its own, and kills all that it has started at its end.

The end comes when the command ends, when the actor no longer wants it, or when the actor dies, even by SIGKILL: the
actor holds the other end of a pipe. On Linux, processes that leave the group become children of this one, so they end,
too. The actor runs this file by its path, without Offbeat's packages: `python -I -S guard.py PIPE COMMAND...`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def children() -> list[int]:
    """Return the children of this process; none on systems that do not tell."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


def main() -> None:
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        agent = subprocess.Popen(command, process_group=0)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")

    def end_group() -> None:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)

    def watch() -> None:
        # The read ends when the actor closes its end, or is no more.
        os.read(pipe, 1)
        end_group()

    threading.Thread(target=watch, daemon=True).start()
    status = agent.wait()
    end_group()
    # What a killed child has started becomes a child of this process in turn.
    while left := children():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
    # The thread still reads, and must not hold up the end.
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
