"""`offbeat train`: starts every role, watches them, shows progress, stops them, writes the summary."""

import contextlib
import logging
import signal
import time
from pathlib import Path
from types import FrameType

from launch import run_folder
from launch.errors import RoleFailed
from launch.processes import role_command, role_environment, spawn, stop, tail
from launch.run_file.keys_folder import http_keys, prepare_keys
from launch.run_file.sections import RunConfig
from launch.supervise import shared_memory
from launch.supervise.broker_status import Poller
from launch.supervise.crew import BROKER_START_S, LEARNER, LEARNER_STOP_S, RESULT, Crew
from launch.supervise.health import BROKER
from launch.supervise.panel import Panel
from launch.supervise.summary import Summary, write_summary
from protocol.security.http_tls import scheme

log = logging.getLogger(__name__)

POLL_S = 0.25
PREPARE_S = 7200.0


def train(config: RunConfig, *, resume: bool, panel: Panel) -> Summary:
    """Run the whole job. Return the summary, which is also written to the run folder.

    Raises:
        RoleFailed: the model could not be made, a process ended with an error that another start would
            repeat, or a process ended too often in a row. All other processes are stopped first.
        KeyboardInterrupt: interrupted before training began, or twice.
    """
    started = time.monotonic()
    interrupt = Interrupt()
    folder = run_folder.create(config, resume=resume)
    with contextlib.ExitStack() as held:
        held.enter_context(run_folder.claim(folder))
        # Sweep before `own` takes the lock, to remove what an earlier start of this run has left, too.
        for left in shared_memory.sweep():
            panel.note(f"removed {left}, left by a run that was killed")
        held.enter_context(shared_memory.hold_folder(folder))
        config = run_folder.with_ports(config)
        run_folder.save_config(config, folder / run_folder.CONFIG)
        panel.note(f"run folder {folder}")
        prepare_model(config, folder, panel, interrupt)
        crew = Crew(config, folder, note=panel.note)
        try:
            supervise(crew, config, folder, panel, interrupt, resume=resume)
        finally:
            stubborn = crew.stop()
            panel.close()
        summary = write_summary(
            config,
            folder,
            wall_seconds=time.monotonic() - started,
            killed=stubborn,
            restarts=crew.restarts,
            restart_reasons=crew.restart_reasons,
        )
    panel.show(summary)
    return summary


def supervise(
    crew: Crew, config: RunConfig, folder: Path, panel: Panel, interrupt: "Interrupt", *, resume: bool
) -> None:
    """Start all roles and keep them running until the learner is done.

    Pass an interrupt on to the learner.
    """
    keys = prepare_keys(config, folder)
    crew.start([BROKER], resume=resume)
    ask_with = http_keys(config, keys)
    poller = Poller(config.broker.http, ask_with)
    try:
        await_broker(crew, poller, interrupt)
        crew.start([name for name in crew.names if name != BROKER], resume=resume)
        panel.note(
            f"started {', '.join(crew.names)}; status at {scheme(ask_with)}://{config.broker.http}/status"
        )
        watch(crew, poller, config, folder, panel, interrupt)
    finally:
        poller.close()


def await_broker(crew: Crew, poller: Poller, interrupt: "Interrupt") -> None:
    """Wait until the broker answers for the first time.

    Raises:
        RoleFailed: the broker ends instead, or does not answer within `BROKER_START_S`.
        KeyboardInterrupt: the user interrupted.
    """
    deadline = time.monotonic() + BROKER_START_S
    while not crew.broker_answered:
        if interrupt.asked:
            raise KeyboardInterrupt
        crew.revive(time.monotonic())
        if time.monotonic() > deadline:
            raise crew.failed(BROKER)
        if answer := poller.take():
            crew.examine(answer)
        time.sleep(0.05)


def watch(
    crew: Crew, poller: Poller, config: RunConfig, folder: Path, panel: Panel, interrupt: "Interrupt"
) -> None:
    """Restart processes that end or hang, show progress and pass an interrupt on, until the learner is done.

    Raises:
        RoleFailed: the learner left no result, or a process cannot be started again.
    """
    asked_at = 0.0
    while not crew.finished():
        if answer := poller.take():
            crew.examine(answer)
            panel.heard(answer)
        if not asked_at:
            crew.revive(time.monotonic())
        panel.update(folder, config, restarts=crew.restarts)
        if interrupt.asked and not asked_at:
            panel.note("stopping: the learner writes a checkpoint")
            crew.ask_learner_to_end()
            asked_at = time.monotonic()
        if asked_at and (not crew.running(LEARNER) or time.monotonic() - asked_at > LEARNER_STOP_S):
            break
        time.sleep(POLL_S)
    panel.update(folder, config, restarts=crew.restarts, last=True)
    if not (folder / RESULT).exists():
        raise crew.failed(LEARNER)


def prepare_model(config: RunConfig, folder: Path, panel: Panel, interrupt: "Interrupt") -> None:
    """Make the tiny model in a separate process, if the run file asks for one. A cached model is kept.

    Raises:
        RoleFailed: the process failed, or took longer than `PREPARE_S`.
        KeyboardInterrupt: the user interrupted.
    """
    if config.model.path or config.model.tiny is None:
        return
    panel.note("model: making and warm-starting it, unless it is cached")
    env = role_environment(1, local_model=True)
    child = spawn("model", role_command("model", folder), log=folder / "logs" / "model.log", env=env)
    deadline = time.monotonic() + PREPARE_S
    while child.running:
        if interrupt.asked or time.monotonic() > deadline:
            stop([child], patience_s=5.0)
        if interrupt.asked:
            raise KeyboardInterrupt
        time.sleep(POLL_S)
    if child.process.returncode != 0:
        late = f" (stopped after {PREPARE_S:g} s)" if time.monotonic() > deadline else ""
        raise RoleFailed(
            f"model ended with code {child.process.returncode}{late}; the end of {child.log}:\n{child.tail()}"
        )
    panel.note("model: " + tail(child.log, 1).split(": ", 1)[-1])


class Interrupt:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an orderly stop; the next raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
