"""Processes of roles: their command lines and environments, children that die with their parent, free ports."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launch.supervise.health import Vitals
from learner.settings.learner import LearnerConfig
from protocol.processes import VARIABLE, die_with_parent

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(limit: Path = CPU_LIMIT) -> int:
    """Return how many cores this process may keep busy: those of its affinity, or fewer if its container has a limit.

    Args:
        limit: file of the control group: microseconds of CPU time and the period, or "max" and the period.
    """
    there = len(os.sched_getaffinity(0))
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        return there if quota == "max" else max(1, min(there, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return there


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it started; 0 if it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class _Stat:
    parent: int
    state: str
    cpu_s: float


def families(pids: Iterable[int]) -> dict[int, dict[int, _Stat]]:
    """Return for each of ``pids`` the living processes among it and its descendants."""
    table = _process_table()
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, []).append(pid)
    found: dict[int, dict[int, _Stat]] = {}
    for head in pids:
        members, frontier = {}, [head] if head in table else []
        while frontier:
            pid = frontier.pop()
            members[pid] = table[pid]
            frontier += children.get(pid, [])
        found[head] = members
    return found


def _process_table() -> dict[int, _Stat]:
    table = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        # A process may end after /proc was listed.
        with contextlib.suppress(OSError, IndexError):
            fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
                table[int(entry.name)] = _Stat(int(fields[1]), fields[0], cpu_s)
    return table


PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10_240
PORT_TRIES = 100


def free_port() -> int:
    """Return a TCP port on loopback that nothing listens on now. Who needs several calls `free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different TCP ports on loopback that nothing listens on now.

    The ports lie below the range from which the kernel assigns ports to clients. Otherwise a peer that keeps
    trying to reach a broker that is being restarted could be assigned that very port, and the broker would
    find it taken. If no such port is found, the kernel chooses one.

    >>> len(set(free_ports(3)))
    3
    """
    with contextlib.ExitStack() as stack:
        # Each port stays bound until all are found, so that none is found twice.
        return [_bind_free(stack.enter_context(socket.socket())) for _ in range(count)]


def _bind_free(sock: socket.socket) -> int:
    highest = _lowest_client_port() - 1
    for _ in range(PORT_TRIES if highest > LOWEST_PORT else 0):
        port = random.randint(LOWEST_PORT, highest)
        with contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])


def _lowest_client_port() -> int:
    try:
        return int(PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


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


RENDEZVOUS_S = 600.0
"""Longest time that the hosts of a learner wait for each other. Then those that are there end."""


def role_environment(threads: int, *, local_model: bool, crowded: bool = False) -> dict[str, str]:
    """Return the environment of a role: pinned threads, no hub look-ups for a local model, quiet libraries.

    Args:
        threads: threads of OpenMP and MKL.
        local_model: the model is a folder, so the Hugging Face hub is not asked for it.
        crowded: more threads compute at a time than there are cores. Waiting threads then sleep instead of
            spinning, because spinning would keep the working threads from their cores. A value of
            OMP_WAIT_POLICY that the user has set wins.
    """
    env = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # A file or folder of the user's working folder must not take the place of a module of ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
    }
    # Windows' Linux has no such file. A user who names GPUs there has some.
    if not Path("/dev/nvidiactl").exists() and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        env["DS_ACCELERATOR"] = "cpu"
    if local_model:
        env["HF_HUB_OFFLINE"] = "1"
    if crowded and "OMP_WAIT_POLICY" not in os.environ:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    return env


def gpu_lock(run_dir: Path) -> dict[str, str]:
    """Return the environment by which a process takes part in the lock on shared GPUs, see `protocol.processes`."""
    return {VARIABLE: str(run_dir / "gpu-lock")}


@dataclass(frozen=True)
class Ranks:
    """The ranks of a learner on one host, and how they find those on its other hosts."""

    processes: int = 1
    nodes: int = 1
    """Hosts of the learner."""
    node: int = 0
    """Number of this host, from 0; the first has rank 0."""
    rendezvous: str = ""
    """HOST:PORT of the first host; read only if there are several."""

    def torchrun(self) -> list[str]:
        """Return the command of torchrun up to the program; [] for a single rank, which needs none.

        Example:
            >>> Ranks(2, nodes=3, node=1, rendezvous="[fd00::1]:29500").torchrun()[3:]
            ['--nproc_per_node', '2', '--nnodes', '3', '--node_rank', '1', '--master_addr', 'fd00::1', \
'--master_port', '29500', '--rdzv_conf', 'timeout=600']
        """
        if self.processes == self.nodes == 1:
            return []
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(self.processes)]
        if self.nodes == 1:
            return [*torchrun, "--master_port", str(free_port())]
        host, _, port = self.rendezvous.rpartition(":")
        place = ["--nnodes", str(self.nodes), "--node_rank", str(self.node)]
        place += ["--master_addr", host.strip("[]"), "--master_port", port]
        return [*torchrun, *place, "--rdzv_conf", f"timeout={RENDEZVOUS_S:.0f}"]


def ranks_of(learner: LearnerConfig, node: int = 0) -> Ranks:
    """Return the ranks of a learner on one of its hosts."""
    return Ranks(learner.processes, learner.nodes, node, learner.rendezvous)


def command_of_role(role: str, run_dir: Path, *arguments: str, ranks: Ranks | None = None) -> list[str]:
    """Return the command line of one role process. Torchrun starts the ranks of a learner that has several."""
    module = ["launch.role", role, str(run_dir), *arguments]
    torchrun = ranks.torchrun() if ranks is not None else []
    return [*torchrun, "--module", "--", *module] if torchrun else [sys.executable, "-m", *module]
