"""The actor of Ray that runs one host, by which Ray's workers import it: nothing of this may be slow to import."""

import os
import secrets
import subprocess
from pathlib import Path

TASK = "OFFBEAT_TASK"
"""Environment variable with what tells a host apart from others that share its ticket."""


LOG = "host.log"
"""Output of the host, in its folder."""


class HostActor:
    """One host: a process `offbeat host` that ends with its actor. Ray starts it again on another node, by itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._leaving = False

    def run(self, ticket: str, command: str, folder: str, number: int) -> int:
        """Run a host until it ends. Return its exit code.

        Args:
            ticket: content of the ticket, which the process reads from its standard input. It is an argument of this
                method, not of the constructor, because Ray keeps those in the memory of its head.
            command: shell script that runs `offbeat host --ticket -`.
            folder: working folder on this node.
            number: number of the host. A start on another node has another name, as the earlier one may still drain.
        """
        there = Path(folder).expanduser()
        there.mkdir(parents=True, exist_ok=True)
        with open(there / LOG, "ab") as log:
            self._process = subprocess.Popen(
                # A worker of Ray is killed without a word; the host drains then.
                ["setpriv", "--pdeathsig", "TERM", "/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=there,
                env=os.environ | {TASK: f"{number}-{secrets.token_hex(2)}"},
            )
        # Invariant: `drain` runs in another thread, and may have come before there was a process.
        if self._leaving:
            self._process.terminate()
        self._process.communicate(ticket.encode())
        return self._process.returncode

    def drain(self) -> None:
        """Ask the host to end its work; `run` returns when it has."""
        self._leaving = True
        if self._process is not None:
            self._process.terminate()
