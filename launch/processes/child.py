"""Child processes in a group of their own, killed with their parent, and stopped by pid."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launch.processes.kernel import families, oom_kills
from launch.supervise.health import Vitals
from protocol.processes import die_with_parent

KILL_ALL_S = 2.0
"""Longest wait of `kill_all`."""
LATE_S = 2.0
"""Time after which `stop` names the processes that it waits for."""
KILL_S = 10.0
"""Longest wait after SIGKILL. A process that lives longer waits in the kernel for a disk or a device."""
DUMP_S = 0.3
TAIL_BYTES = 65_536


@dataclass
class Child:
    """A running role process and its log file."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path
    log_begin: int = 0
    """Bytes of the log that earlier processes of this name wrote."""
    oom_kills: int = field(default_factory=oom_kills)
    """Processes that the kernel had killed for want of memory when this one was started."""
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def tail(self) -> str:
        """Return the last lines that the process wrote."""
        return tail(self.log)

    def own_tail(self, lines: int) -> str:
        """Return the last lines, those of earlier processes of this name left out."""
        return tail(self.log, lines, begin=self.log_begin)


def tail(log: Path, lines: int = 15, *, begin: int = 0) -> str:
    """Return the last lines of a log file from byte ``begin`` on, or "" if it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def with_tail(how: str, log: Path) -> str:
    """Return how a process ended, and the last lines of its log.

    Example:
        >>> with_tail("broker does not answer", Path("runs/a/logs/none.log"))
        'broker does not answer, and its log runs/a/logs/none.log is empty'
    """
    lines = tail(log)
    return f"{how}; the end of {log}:\n{lines}" if lines else f"{how}, and its log {log} is empty"


def spawn(name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Child:
    """Start a process in its own group. The kernel sends it SIGKILL when the thread that calls this ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    return Child(name, list(command), process, log, begin)


def stop(
    children: Sequence[Child],
    *,
    patience_s: float,
    late: Callable[[Sequence[str]], None] = lambda names: None,
) -> list[str]:
    """Send SIGTERM to all, wait up to ``patience_s``, then kill the families of those that still run.

    Args:
        late: called with the names of those that still run after `LATE_S`.

    Returns:
        The names of the processes that had to be killed.
    """
    for child in children:
        if child.running:
            child.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    deadline = began + patience_s
    stubborn = []
    _wait(children, min(began + LATE_S, deadline))
    if slow := [child.name for child in children if child.running]:
        late(slow)
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stubborn.append(child.name)
            kill(child)
    return stubborn


def kill_all(children: Sequence[Child]) -> list[str]:
    """Send SIGKILL to all processes with their descendants at once, and wait up to `KILL_ALL_S`.

    Returns:
        The names of the processes that are still there.
    """
    for child, family in zip(children, families([c.process.pid for c in children]).values(), strict=True):
        if child.running:
            _send_kill(child, family)
    _wait(children, time.monotonic() + KILL_ALL_S)
    return [child.name for child in children if child.running]


def _wait(children: Sequence[Child], deadline: float) -> None:
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _send_kill(child: Child, family: Iterable[int]) -> None:
    # Killing the group is not enough, because torchrun's ranks have their own groups.
    with contextlib.suppress(ProcessLookupError):
        # `spawn` made the process the leader of its group, so its pid names the group.
        os.killpg(child.process.pid, signal.SIGKILL)
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def dump_stacks(child: Child) -> None:
    """Ask a process that hangs to write into its log where its threads stand, and give it a moment for it.

    `launch.role` registers the handler. A process without one ends by the signal.
    """
    child.process.send_signal(signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(DUMP_S)


def kill(child: Child) -> bool:
    """Send SIGKILL to a process, its group and all its descendants.

    Return whether it is gone within `KILL_S`.
    """
    _send_kill(child, families([child.process.pid])[child.process.pid])
    try:
        child.process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def vitals(children: Sequence[Child]) -> dict[str, Vitals]:
    """Return the kernel's findings about each process and its descendants, by name."""
    known = families([child.process.pid for child in children])
    return {
        child.name: Vitals(
            stopped=next((pid for pid, stat in known[child.process.pid].items() if stat.state == "T"), 0),
            cpu_s=sum(stat.cpu_s for stat in known[child.process.pid].values()),
        )
        for child in children
    }
