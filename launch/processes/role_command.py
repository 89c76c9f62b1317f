"""The command line and the environment of a role's process."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.processes.ports import free_port
from learner.settings.learner import LearnerConfig
from protocol.processes import VARIABLE

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


def role_command(role: str, run_dir: Path, *arguments: str, ranks: Ranks | None = None) -> list[str]:
    """Return the command line of one role process. Torchrun starts the ranks of a learner that has several."""
    module = ["launch.role", role, str(run_dir), *arguments]
    torchrun = ranks.torchrun() if ranks is not None else []
    return [*torchrun, "--module", "--", *module] if torchrun else [sys.executable, "-m", *module]
