"""A head with a broker, a weights server and a learner in the test, and hosts that are started by `offbeat host`."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from launch.cli import main
from launch.processes import free_port
from launch.run_file.load import check
from launch.run_folder import ASKED, CONFIG, save_config
from tests.campaigns.faults.proof import Proof, prove
from tests.e2e.namespaces import Host
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT, Hosts
from tests.integration.protocol.encrypted_harness import until

TURNS = 4
"""Turns of an episode, each a segment."""
OFFBEAT = """
import sys
from launch.supervise import crew
ROLE = "tests.integration.hosts.counting_role"
crew.command_of_role = lambda role, folder, *rest, ranks=None: [sys.executable, "-m", ROLE, role, str(folder), *rest]
from launch.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command `offbeat`, whose roles have the counting engine."""


class Fleet(Hosts):
    """A run folder as `offbeat train` would have it, and hosts with folders and caches of their own."""

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self.run = folder / "head" / "run"
        self.run.mkdir(parents=True)
        super().__init__(self.run, journal=self.run / "journal", address=address)
        self.home, self.hosts = folder, {}
        weights = f"{address}:{free_port()}"
        self.config = check(
            {
                "run": {"name": "run"},
                "model": {"path": str(self.model)},
                "env": {"name": self.env, "params": {"turns": TURNS}},
                "broker": {"endpoint": self.broker.endpoint, "http": self.broker.http, "heartbeat_s": 1.0},
                "weights": {"http": weights},
                "generator": {"count": 0, "max_model_len": 256},
                "actor": {"count": 0, "concurrent_episodes": 4, "max_turns": 8},
            },
            "a test",
        )
        for name in (CONFIG, ASKED):
            save_config(self.config, self.run / name)
        with open(self.run / "weights.log", "ab") as out:
            self.weights = subprocess.Popen(
                [sys.executable, "-m", "launch.role", "weights", str(self.run)],
                cwd=self.run.parent,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=out,
            )

    def ticket(self, *arguments: str) -> str:
        """Make a ticket, and return the command that is printed for the host."""
        folder = self.home / "tickets"
        folder.mkdir(exist_ok=True)
        with contextlib.chdir(folder), open(folder / "said", "w") as said, contextlib.redirect_stdout(said):
            assert main(["ticket", str(self.run), *arguments]) == 0
        (line,) = (folder / "said").read_text().splitlines()
        return line

    def join(
        self, name: str, command: str, *more: str, pause_s: float = 0.0, inside: Host | None = None
    ) -> subprocess.Popen:
        """Start a host in a folder of its own, with its ticket there and the command as it was printed.

        Args:
            inside: namespaces that the host runs in; None: those of the test.
        """
        folder = self.home / name
        folder.mkdir(exist_ok=True)
        program, *words = shlex.split(command)
        assert program == "offbeat"
        ticket = words[-1]
        source = self.home / "tickets" / ticket
        if source.exists():
            source.rename(folder / ticket)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "COUNTING_PAUSE_S": str(pause_s),
            "OFFBEAT_LOG_LEVEL": "debug",
            "OMP_NUM_THREADS": "1",
        }
        line = [sys.executable, "-c", OFFBEAT, *words, *more]
        if inside is not None:
            # Several hosts may share the namespaces, and their folder.
            line[-1 - len(more)] = str(folder / ticket)
            line = inside.command(f"exec {shlex.join(line)}")
        with open(folder / "host.log", "ab") as out:
            self.hosts[name] = subprocess.Popen(
                line,
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=out,
            )
        return self.hosts[name]

    def log_of(self, name: str) -> str:
        return (self.home / name / "host.log").read_text()

    def status_of(self, host: str) -> dict | None:
        """Return what `/status` says of a host; None if it is not there."""
        return next((one for one in self.broker.status()["hosts"] if one["name"] == host), None)

    def await_host(self, name: str, host: str, generators: int = 1, actors: int = 2) -> None:
        def joined():
            assert self.hosts[name].poll() is None, self.log_of(name)
            found = self.status_of(host)
            return found and (found["generators"], found["actors"]) == (generators, actors)

        until(joined, f"{host} joins: {self.log_of(name)}", PATIENCE_S)

    def kill(self, name: str, host: str) -> None:
        """Kill all processes of a host at once, as a power cut would."""
        peers = [peer["pid"] for peer in self.broker.status()["peers"] if peer["on_host"] == host]
        for pid in [self.hosts[name].pid, *peers]:
            os.kill(pid, signal.SIGKILL)
        self.hosts[name].wait(PATIENCE_S)

    def proof(self) -> Proof:
        """End the broker, and prove from its journal and the actors' logs that the run lost nothing."""
        self.broker.stop()
        logs = self.run / "logs"
        logs.mkdir()
        for path in self.home.glob("*/runs/run/hosts/*/logs/actor*.log"):
            (logs / path.name).symlink_to(path)
        return prove(self.run)

    def end(self, name: str, patience_s: float = PATIENCE_S) -> int:
        self.hosts[name].send_signal(signal.SIGTERM)
        return self.hosts[name].wait(patience_s)

    def close(self) -> None:
        for process in [*self.hosts.values(), self.weights]:
            if process.poll() is None:
                process.terminate()
        for process in [*self.hosts.values(), self.weights]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE_S)
        super().close()
