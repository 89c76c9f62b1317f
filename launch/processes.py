"""Child processes: threads pinned, own process group, dead with their parent, stopped by pid."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # looked up now: between fork and exec only a bare call is safe


@dataclass
class Child:
    """A running role process and its log file."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 15) -> str:
        """The last lines it wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def spawn(name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Child:
    """Start a process in its own group; it is sent SIGKILL when this process dies."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return Child(name, list(command), process, log)


def role_environment(threads: int, *, local_model: bool) -> dict[str, str]:
    """Environment of a role: pinned threads, no hub look-ups for a model that is a folder, quiet libraries."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
    }
    if not Path("/dev/nvidiactl").exists():
        env["DS_ACCELERATOR"] = "cpu"
    if local_model:
        env["HF_HUB_OFFLINE"] = "1"
    return env


def role_command(role: str, run_dir: Path, *arguments: str, processes: int = 1) -> list[str]:
    """Command line of one role process; several learner ranks are started by torchrun."""
    module = ["launch.role", role, str(run_dir), *arguments]
    if processes == 1:
        return [sys.executable, "-m", *module]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return [*torchrun, "--master_port", str(free_port()), "--module", "--", *module]


def stop(children: Sequence[Child], *, patience_s: float) -> list[str]:
    """SIGTERM to all, wait, SIGKILL to the groups of those that stay; returns the names of the latter."""
    for child in children:
        if child.running:
            child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    stubborn = []
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stubborn.append(child.name)
            os.killpg(child.process.pid, signal.SIGKILL)  # its own group: start_new_session
            child.process.wait()
    return stubborn


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def die_with_parent() -> None:
    """Ask the kernel to send this process SIGKILL when its parent dies (Linux)."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
