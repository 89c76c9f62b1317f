"""`offbeat train`: starts every role, watches them, shows progress, stops them, writes the summary."""

import contextlib
import json
import logging
import os
import shutil
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
from learner.run_files import PID_FILE, weights_folder

log = logging.getLogger(__name__)

POLL_S = 0.25
BROKER_START_S = 30.0
LEARNER_STOP_S = 60.0
OTHERS_STOP_S = 30.0
MAX_RESTARTS = 5
"""In a row; a process that has run for `SETTLED_S` begins a new row."""
SETTLED_S = 300.0


def train(config: RunConfig, *, resume: bool, panel: Panel) -> Summary:
    """Run the whole job; returns the summary that was also written to the run folder.

    Raises:
        RoleFailed: model preparation, broker or learner ended with an error. All else is stopped first.
        KeyboardInterrupt: interrupted before training began, or twice.
    """
    started = time.monotonic()
    interrupt = Interrupt()
    folder = run_folder.create(config, resume=resume)
    with run_folder.claim(folder):
        config = run_folder.with_ports(config)
        run_folder.save_config(config, folder / run_folder.CONFIG)
        panel.note(f"run folder {folder}")
        prepare_model(config, folder, panel, interrupt)
        crew = Crew(config, folder)
        try:
            crew.start(resume=resume)
            names = ", ".join(child.name for child in crew.children)
            panel.note(f"started {names}; status at http://{config.broker.http}/status")
            watch(crew, panel, interrupt)
        finally:
            stubborn = crew.stop()
            panel.close()
        summary = write_summary(config, folder, wall_seconds=time.monotonic() - started, killed=stubborn)
    panel.show(summary)
    return summary


def watch(crew: "Crew", panel: Panel, interrupt: "Interrupt") -> None:
    """Until the learner has ended: restart who may be, show progress, pass an interrupt on to the learner."""
    asked_at = 0.0
    while crew.learner.running:
        crew.revive(panel)
        panel.update(crew.folder, crew.config)
        if interrupt.asked and not asked_at:
            panel.note("stopping: the learner writes a checkpoint")
            crew.ask_learner_to_end()
            asked_at = time.monotonic()
        if asked_at and time.monotonic() - asked_at > LEARNER_STOP_S:
            panel.note(f"the learner did not end within {LEARNER_STOP_S:g} s")
            break
        time.sleep(POLL_S)
    panel.update(crew.folder, crew.config, last=True)
    if crew.learner.process.poll() != 0:
        raise failed(crew.learner)


def prepare_model(config: RunConfig, folder: Path, panel: Panel, interrupt: "Interrupt") -> None:
    """Make the tiny model if the run file asks for one and it is not in the cache; in a process of its own."""
    if config.model.path or config.model.tiny is None:
        return
    panel.note("model: making and warm-starting it, unless it is cached")
    env = role_environment(1, local_model=True)
    child = spawn("model", role_command("model", folder), log=folder / "logs" / "model.log", env=env)
    while child.running:
        if interrupt.asked:
            stop([child], patience_s=5.0)
            raise KeyboardInterrupt
        time.sleep(POLL_S)
    if child.process.returncode != 0:
        raise failed(child)
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
        (self.folder / PID_FILE).unlink(missing_ok=True)
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
            RoleFailed: the broker ended, or another role did so too often in a row.
        """
        for i, child in enumerate(self.children):
            if child.running or child.name == "learner":
                continue
            settled = time.monotonic() - child.started > SETTLED_S
            restarts = 0 if settled else child.restarts + 1
            if child.name == "broker" or restarts > MAX_RESTARTS:
                raise failed(child)
            panel.note(f"{child.name} ended with code {child.process.returncode}; starting it again")
            role = child.name.rsplit("-", 1)[0]
            threads = self.config.generator.threads if role == "generator" else 1
            fresh = spawn(child.name, child.command, log=child.log, env=self._environment(threads))
            fresh.restarts = restarts
            self.children[i] = fresh

    def ask_learner_to_end(self) -> None:
        """SIGTERM to the learner's rank 0; torchrun, asked instead, would kill the ranks and report a failure."""
        path = self.folder / PID_FILE
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()) if path.exists() else self.learner.process.pid, signal.SIGTERM)

    def stop(self) -> list[str]:
        """Learner, then actors and generators, then the broker; returns who had to be killed."""
        stubborn: list[str] = []
        for role in ("learner", "actor", "generator", "broker"):
            patience_s = LEARNER_STOP_S if role == "learner" else OTHERS_STOP_S
            stubborn += stop([c for c in self.children if c.name.startswith(role)], patience_s=patience_s)
        # What a process that was killed could not clean up itself.
        shutil.rmtree(weights_folder(self.folder), ignore_errors=True)
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
        ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
        deadline = time.monotonic() + BROKER_START_S
        broker = self.children[0]
        while time.monotonic() < deadline and broker.running:
            try:
                with ask.open(url, timeout=1.0) as answer:
                    json.load(answer)
                    return
            except (urllib.error.URLError, OSError, ValueError):
                time.sleep(0.05)
        raise failed(broker)


def failed(child: Child) -> RoleFailed:
    """The error that says how a process ended, with the end of its log."""
    code = child.process.poll()
    state = "does not answer" if code is None else f"ended with code {code}"
    return RoleFailed(f"{child.name} {state}; the end of {child.log}:\n{child.tail()}")


class Interrupt:
    """Ctrl-C, SIGTERM or a lost terminal ask for an orderly stop; a second time raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
