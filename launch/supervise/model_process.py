"""Prepares the model of a run in a process of its own, before the roles start."""

import time
from pathlib import Path

from launch.errors import RoleFailed
from launch.processes.child import spawn, stop, tail
from launch.processes.role_command import role_command, role_environment
from launch.run_file.sections import RunConfig
from launch.supervise.interrupt import Interrupt
from launch.supervise.terminal.panel import Panel

POLL_S = 0.25
PREPARE_S = 7200.0
MAKING = "model: making and warm-starting it, unless it is cached (usually under a minute, or 5 s)"
DOWNLOADING = "model: finding it, or downloading it from the hub"


def prepare_model(config: RunConfig, folder: Path, panel: Panel, interrupt: Interrupt) -> None:
    """Make the tiny model, or download the model of the hub, in a separate process. A model that is here is kept.

    Roles that start together would all download it, within the time that they have to join.

    Raises:
        RoleFailed: the process failed, or took longer than `PREPARE_S`.
        KeyboardInterrupt: the user interrupted.
    """
    there = config.model.local if config.model.path else config.model.tiny is None
    if there:
        return
    making = DOWNLOADING if config.model.path else MAKING
    env = role_environment(1, local_model=config.model.local)
    child = spawn("model", role_command("model", folder), log=folder / "logs" / "model.log", env=env)
    begun = time.monotonic()
    deadline = begun + PREPARE_S
    while child.running:
        panel.stage(making, time.monotonic() - begun)
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
