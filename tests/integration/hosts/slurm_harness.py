"""A Slurm of four nodes on this machine, of Debian's programs, in a folder of its own; nothing of it is a service."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from launch.processes import free_ports
from tests.integration.protocol.encrypted_harness import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("n1", "n2", "n3", "n4")
PATIENCE_S = 60.0


def why_not() -> str:
    """Return why there can be no cluster here, or ""."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "only root may start the daemons"


class Cluster:
    """The daemons of a cluster. ``low`` may be preempted by ``high``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes = folder, {}
        folder.mkdir(mode=0o755)
        munge = folder / "munge"
        munge.mkdir(mode=0o700)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        until((munge / "socket").exists, "munged listens", PATIENCE_S)
        self.conf = folder / "slurm.conf"
        self.conf.write_text(self._settings(munge))
        for name in ("state", "spool"):
            (folder / name).mkdir()
        self._start("slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            self.start_node(node)
        until(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(NODES)),
            "all nodes are idle",
            PATIENCE_S,
        )

    def run(self, *words: str) -> str:
        """Run a client, and return what it prints; "" if it fails."""
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            env={**os.environ, "SLURM_CONF": str(self.conf)},
        )  # fmt: skip
        return done.stdout.strip()

    def tasks(self, name: str) -> dict[str, tuple[str, str]]:
        """Return state and node of each task of an array that is not over, by its number; pending ones are split."""
        lines = self.run("squeue", "-h", "-r", "-o", "%K %T %N", f"--name={name}").splitlines()
        return {
            words[0]: (words[1], words[2] if len(words) > 2 else "")
            for words in (line.split() for line in lines)
        }

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, "-f", str(self.conf), name=node)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as a power cut would."""
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.conf}".encode()}
        jobs = [pid for pid in _pids() if marks <= set(_read(pid, "environ").split(b"\0"))]
        parents = {
            int(_read(pid, "stat").rpartition(b")")[2].split()[1]) for pid in jobs if _read(pid, "stat")
        }
        steps = [pid for pid in parents if _read(pid, "comm").startswith(b"slurmstepd")]
        daemon = self._processes[node]
        for pid in [daemon.pid, *steps, *jobs]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait(PATIENCE_S)

    def close(self) -> None:
        self.run("scancel", "--user=root")
        until(lambda: not self.run("squeue", "-h", "-t", "RUNNING,COMPLETING"), "jobs have ended", PATIENCE_S)
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE_S)

    def _start(self, *words: str, name: str = "") -> None:
        with open(self.folder / f"{name or words[0]}.log", "ab") as log:
            self._processes[name or words[0]] = subprocess.Popen(words, stdout=log, stderr=log)

    def _settings(self, munge: Path) -> str:
        controller, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname()
        lines = [
            "ClusterName=fleet", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
            f"SlurmctldPort={controller}", "AuthType=auth/munge", f"AuthInfo=socket={munge}/socket",
            f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid", f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core", "SlurmdParameters=config_overrides", "SlurmdTimeout=15",
            "ReturnToService=2", "SchedulerParameters=bf_interval=2,sched_interval=2", "KillWait=15",
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", "MpiDefault=none",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000"
                for node, port in zip(NODES, ports, strict=True)
            ),
            "PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30",
            "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
