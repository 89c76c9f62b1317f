"""The run that the campaign breaks: `offbeat train` in its own folder, watched from outside."""

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
START_S = 600.0
POLL_S = 0.1
FRESH_S = 1.5
"""Seconds after which a silent peer does not count as up: three heartbeats."""


class Deadlock(AssertionError):
    """The run did not go on within its deadline."""


class System:
    """A run, its supervisor, and the broker's `/status`.

    Args:
        dir: folder below which the run folder is made. It is a tmpfs if the campaign fills disks.
        overrides: overrides of the run file.
        environment: environment variables of all processes.
    """

    def __init__(self, dir: Path, overrides: list[str], environment: dict[str, str]) -> None:
        self.dir, self.folder = dir, dir / "faults"
        self._overrides, self._environment = overrides, environment
        self.supervisor: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool = False, back_to: int | None = None) -> "subprocess.Popen[bytes]":
        """Start the supervisor, which starts all other processes.

        Args:
            resume: go on with the run.
            back_to: learner step of the checkpoint to go back to.
        """
        options = ["--resume"] if resume else []
        options += ["--from", str(back_to)] if back_to is not None else []
        command = [sys.executable, "-m", "launch.cli", "train", str(SETTINGS), f"run.dir={self.dir}"]
        with open(self.dir / "train.log", "ab") as log:
            self.supervisor = subprocess.Popen(
                [*command, *self._overrides, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", **self._environment},
            )
        return self.supervisor

    def end(self) -> int:
        """Ask the run to end in order. Return its exit code."""
        assert self.supervisor is not None
        self.supervisor.send_signal(signal.SIGINT)
        return self.supervisor.wait(180.0)

    @property
    def config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return loaded

    def status(self) -> dict[str, Any] | None:
        """Return the broker's status, or None if it does not answer."""
        try:
            return fetch(self.config["broker"]["http"], keys=self.folder / "keys")
        except (NoAnswer, OSError, ValueError, KeyError):
            return None

    def pid(self, name: str) -> int:
        """Return the process id of a role's process, as the supervisor knows it."""
        state = json.loads((self.folder / "supervisor.json").read_text())
        return int(state["processes"][name]["pid"])

    def descendants(self, name: str) -> list[int]:
        """Return the descendants of a role's process. The one with the most processor time comes first."""
        head = self.pid(name)
        family = families([head])[head]
        return sorted((pid for pid in family if pid != head), key=lambda pid: -family[pid].cpu_s)

    def committed(self) -> int | None:
        """Return the segments ever committed as trained, later roll-backs included, or None if unknown.

        The number grows with each learner step.
        """
        status = self.status()
        if status is None:
            return None
        ledger = status["ledger"]
        return int(ledger["outcomes"]["trained"]["segments"] + ledger["rolled_back"]["segments"])

    def well(self, *, generators: int = 1) -> bool:
        """Return whether the broker answers, has just heard all actors and the learner, and has generators.

        The process ids of the learner and the actors must be those that the supervisor knows.

        Args:
            generators: how many generators the broker has to offer. A killed generator comes back slowly,
                because vLLM takes long to start, and the run does not wait for it as long as another one is
                up.
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
        """Return the names of all processes under the supervisor."""
        return list(json.loads((self.folder / "supervisor.json").read_text())["processes"])

    def generators(self) -> list[str]:
        """Return the names of the generators that the broker currently offers to actors."""
        return sorted((self.status() or {"generators_offered": []})["generators_offered"])

    def goes_on(self, deadline_s: float) -> None:
        """Wait until all roles are there and a further learner step is committed.

        Raises:
            Deadlock: either wait took longer than the deadline, or the supervisor has ended.
        """
        self.until(self.well, deadline_s, "all roles are there")
        before = self.committed() or 0
        self.until(lambda: (self.committed() or 0) > before, deadline_s, "a further step is committed")

    def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait until ``condition`` holds.

        Raises:
            Deadlock: it did not hold within the deadline, or the supervisor has ended.
        """
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
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
