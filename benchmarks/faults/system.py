"""The run under faults: `offbeat train` in a folder of its own, watched from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.errors import NoAnswer
from launch.processes import families
from launch.supervise.broker_status import fetch

SETTINGS = Path(__file__).with_name("faults.toml")
START_S = 240.0
POLL_S = 0.1
FRESH_S = 1.5
"""Three heartbeats."""


class Deadlock(AssertionError):
    """The run did not go on within its deadline."""


class System:
    """A run, its supervisor and what `/status` says.

    Args:
        dir: the run folder is made below it; a tmpfs, if disks are to be filled.
        overrides: of the run file.
        environment: variables of all processes.
    """

    def __init__(self, dir: Path, overrides: list[str], environment: dict[str, str]) -> None:
        self.dir, self.folder = dir, dir / "faults"
        self._overrides, self._environment = overrides, environment
        self.supervisor: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool = False) -> "subprocess.Popen[bytes]":
        """Start the supervisor, which starts the rest."""
        command = [sys.executable, "-m", "launch.cli", "train", str(SETTINGS), f"run.dir={self.dir}"]
        with open(self.dir / "train.log", "ab") as log:
            self.supervisor = subprocess.Popen(
                [*command, *self._overrides, *(["--resume"] if resume else [])],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", **self._environment},
            )
        return self.supervisor

    def end(self) -> int:
        """Ask for an orderly end; returns the exit code."""
        assert self.supervisor is not None
        self.supervisor.send_signal(signal.SIGINT)
        return self.supervisor.wait(180.0)

    @property
    def config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return loaded

    def status(self) -> dict[str, Any] | None:
        """What the broker says, if it does."""
        try:
            return fetch(self.config["broker"]["http"], keys=self.folder / "keys")
        except (NoAnswer, OSError, ValueError, KeyError):
            return None

    def pid(self, name: str) -> int:
        """Of a role's process, as the supervisor knows it."""
        state = json.loads((self.folder / "supervisor.json").read_text())
        return int(state["processes"][name]["pid"])

    def descendants(self, name: str) -> list[int]:
        """Of a role's process, the one that has computed most first."""
        head = self.pid(name)
        family = families([head])[head]
        return sorted((pid for pid in family if pid != head), key=lambda pid: -family[pid].cpu_s)

    def committed(self) -> int | None:
        """Segments ever committed as trained, also those that were given back; it grows with each learner step."""
        status = self.status()
        if status is None:
            return None
        ledger = status["ledger"]
        return int(ledger["outcomes"]["trained"]["segments"] + ledger["rolled_back"]["segments"])

    def well(self, *, generators: int = 1) -> bool:
        """The broker answers, and knows the very learner and actors that the supervisor has, all heard just now.

        And so many generators: one of several takes vLLM's time to come back, and the run does not wait for it.
        """
        status = self.status()
        if status is None:
            return False
        peers = {peer["name"]: peer for peer in status["peers"] if peer["silent_s"] < FRESH_S}
        names = {name for name in self.names() if name == "learner" or name.startswith("actor")}
        return (
            names <= peers.keys()
            and all(peers[name]["pid"] == self.pid(name) for name in names)
            and len(status["generators_offered"]) >= generators
        )

    def names(self) -> list[str]:
        """Of all processes under the supervisor."""
        return list(json.loads((self.folder / "supervisor.json").read_text())["processes"])

    def generators(self) -> list[str]:
        """Those that are offered to actors now."""
        return sorted((self.status() or {"generators_offered": []})["generators_offered"])

    def goes_on(self, deadline_s: float) -> None:
        """Wait until all roles are there and a further learner step is committed.

        Raises:
            Deadlock: that took longer than the deadline, or the supervisor has ended.
        """
        self.until(self.well, deadline_s, "all roles are there")
        before = self.committed() or 0
        self.until(lambda: (self.committed() or 0) > before, deadline_s, "a further step is committed")

    def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Poll, with a deadline."""
        assert self.supervisor is not None
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.supervisor.poll() is not None:
                raise Deadlock(f"the supervisor ended with {self.supervisor.returncode} while: {what}")
            if time.monotonic() > deadline:
                raise Deadlock(
                    f"not within {deadline_s:g} s: {what}; status: {json.dumps(self.status())[:4000]}"
                )
            time.sleep(POLL_S)


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
