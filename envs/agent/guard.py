"""Starts an agent's command in a process group of its own, and kills the whole group at its end.

The end comes when the command ends, when the actor no longer wants it, or when the actor dies, even by SIGKILL: the
actor holds the other end of a pipe. It runs this file by its path, without Offbeat's packages:
`python -I -S guard.py PIPE COMMAND...`.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def main() -> None:
    pipe, command = int(sys.argv[1]), sys.argv[2:]
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
    # The thread still reads, and must not hold up the end.
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
