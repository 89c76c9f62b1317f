"""`offbeat train`: starts every role, watches them, shows progress, stops them, writes the summary."""

import json
import logging
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from launch import run_folder
from launch.config import RunConfig
from launch.errors import RoleFailed
from launch.panel import Panel
from launch.processes import Child, role_command, role_environment, spawn, stop
from launch.summary import Summary, write_summary

log = logging.getLogger(__name__)

POLL_S = 0.25
BROKER_START_S = 30.0
LEARNER_STOP_S = 60.0
OTHERS_STOP_S = 20.0
MAX_RESTARTS = 5


def train(config: RunConfig, *, resume: bool, panel: Panel) -> Summary:
    """Run the whole job; returns the summary that was also written to the run folder.

    Raises:
        RoleFailed: model preparation, broker or learner ended with an error. Everything else is stopped first.
    """
    started = time.monotonic()
    folder = run_folder.create(config, resume=resume)
    config = run_folder.with_ports(config)
    run_folder.save_config(config, folder)
    panel.note(f"run folder {folder}")
    prepare_model(config, folder, panel)
    crew = Crew(config, folder)
    interrupt = _Interrupt()
    try:
        crew.start(resume=resume)
        panel.note(
            f"started {', '.join(c.name for c in crew.children)}; status at http://{config.broker.http}/status"
        )
        while crew.learner.running:
            crew.revive(panel)
            panel.update(folder, config)
            if interrupt.asked and not interrupt.passed_on:
                panel.note("stopping: the learner writes a checkpoint")
                crew.learner.process.send_signal(signal.SIGTERM)
                interrupt.passed_on = True
            time.sleep(POLL_S)
        panel.update(folder, config, last=True)
        if crew.learner.process.returncode != 0:
            raise _failed(crew.learner)
    finally:
        stubborn = crew.stop()
        panel.close()
    summary = write_summary(config, folder, wall_seconds=time.monotonic() - started, killed=stubborn)
    panel.show(summary)
    return summary


def prepare_model(config: RunConfig, folder: Path, panel: Panel) -> None:
    """Make the tiny model if the run file asks for one and it is not in the cache; in a process of its own."""
    if config.model.tiny is None:
        return
    panel.note("model: making and warm-starting it, unless it is cached")
    command = role_command("model", folder)
    env = role_environment(1, local_model=True)
    child = spawn("model", command, log=folder / "logs" / "model.log", env=env)
    interrupt = _Interrupt()
    while child.running:
        if interrupt.asked:
            stop([child], patience_s=5.0)
            raise KeyboardInterrupt
        time.sleep(POLL_S)
    if child.process.returncode != 0:
        raise _failed(child)
    panel.note("model: " + child.tail(1).split(": ", 1)[-1])


@dataclass
class Crew:
    """The role processes of one run."""

    config: RunConfig
    folder: Path
    children: list[Child] = field(default_factory=list)

    @property
    def learner(self) -> Child:
        return next(c for c in self.children if c.name == "learner")

    def start(self, *, resume: bool) -> None:
        """Broker first; the others join it in any order."""
        self._spawn("broker", 1)
        self._await_broker()
        flags = ["--resume"] if resume else []
        learner = self.config.learner
        self._spawn("learner", learner.threads, *flags, processes=learner.processes)
        for i in range(self.config.generator.count):
            self._spawn("generator", self.config.generator.threads, "--name", f"generator-{i}")
        for i in range(self.config.actor.count):
            self._spawn("actor", 1, "--name", f"actor-{i}")

    def revive(self, panel: Panel) -> None:
        """Restart generators and actors that ended; the run cannot do without its broker.

        Raises:
            RoleFailed: the broker ended, or another role did so too often.
        """
        for i, child in enumerate(self.children):
            if child.running or child.name == "learner":
                continue
            if child.name == "broker" or child.restarts >= MAX_RESTARTS:
                raise _failed(child)
            panel.note(f"{child.name} ended with code {child.process.returncode}; starting it again")
            role = child.name.rsplit("-", 1)[0]
            threads = self.config.generator.threads if role == "generator" else 1
            fresh = spawn(child.name, child.command, log=child.log, env=self._environment(threads))
            fresh.restarts = child.restarts + 1
            self.children[i] = fresh

    def stop(self) -> list[str]:
        """Learner, then actors and generators, then the broker; returns who had to be killed."""
        stubborn: list[str] = []
        for role in ("learner", "actor", "generator", "broker"):
            patience_s = LEARNER_STOP_S if role == "learner" else OTHERS_STOP_S
            stubborn += stop([c for c in self.children if c.name.startswith(role)], patience_s=patience_s)
        return stubborn

    def _spawn(self, role: str, threads: int, *arguments: str, processes: int = 1) -> None:
        name = arguments[1] if "--name" in arguments else role
        command = role_command(role, self.folder, *arguments, processes=processes)
        path = self.folder / "logs" / f"{name}.log"
        self.children.append(spawn(name, command, log=path, env=self._environment(threads)))

    def _environment(self, threads: int) -> dict[str, str]:
        path = self.config.model.path
        return role_environment(threads, local_model=not path or Path(path).is_dir())

    def _await_broker(self) -> None:
        url = f"http://{self.config.broker.http}/status"
        deadline = time.monotonic() + BROKER_START_S
        broker = self.children[0]
        while time.monotonic() < deadline and broker.running:
            try:
                with urllib.request.urlopen(url, timeout=1.0) as answer:
                    json.load(answer)
                    return
            except (urllib.error.URLError, OSError, ValueError):
                time.sleep(0.05)
        raise _failed(broker)


def _failed(child: Child) -> RoleFailed:
    code = child.process.poll()
    state = "does not answer" if code is None else f"ended with code {code}"
    return RoleFailed(f"{child.name} {state}; the end of {child.log}:\n{child.tail()}")


class _Interrupt:
    """Ctrl-C and SIGTERM ask for an orderly stop; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = self.passed_on = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
