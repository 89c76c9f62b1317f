"""The posts of a run: which processes there are, how each is started, and how one ended."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import exit_codes
from launch.errors import RoleFailed
from launch.judge_role import JUDGE
from launch.placement import Placement
from launch.processes.child import Child, with_tail
from launch.processes.kernel import oom_kills, usable_cores
from launch.processes.role_command import RENDEZVOUS_S, Ranks, gpu_lock, ranks_of, role_environment
from launch.run_file.sections import RunConfig
from launch.supervise.health import BROKER, STALL_MARGIN_S, Limits, role_of
from launch.supervise.memory_errors import LINES, too_little_memory
from launch.supervise.restarts import RestartBackoff
from launch.weights_role import WEIGHTS

LEARNER = "learner"
ACTOR = "actor"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's GPU memory: the present name and the former one."""
BROKER_START_S = 120.0
"""Longest wait for the first answer of a broker, because reading a long journal takes a while."""


@dataclass
class Post:
    """One place in the crew: how to start its process, the process that runs there now, and its restarts."""

    name: str
    threads: int
    arguments: tuple[str, ...] = ()
    ranks: Ranks | None = None
    """Processes of a learner; None for other roles, which have one."""
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    child: Child | None = None
    due: float | None = None
    """Monotonic time at which to start the process again; set when it has ended."""
    why: str = ""
    """Reason why the supervisor killed the process; empty if it did not."""

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running


def posts(config: RunConfig) -> list[Post]:
    """Return the crew of a run. The broker is first; the others join it in any order."""
    learner, generator = config.learner, config.generator
    crew = [Post(BROKER, 1), Post(LEARNER, learner.threads_used, ranks=ranks_of(learner))]
    if config.weights.http:
        crew.append(Post(WEIGHTS, 1))
    if config.judge is not None:
        crew.append(Post(JUDGE, config.judge.threads))
    for i in range(generator.count):
        crew.append(Post(f"generator-{i}", generator.threads_used, ("--name", f"generator-{i}")))
    for i in range(config.actor.count):
        crew.append(Post(f"actor-{i}", 1, ("--name", f"actor-{i}")))
    return crew


def limits(config: RunConfig) -> Limits:
    """Return how long the processes of a run may be silent, or without progress."""
    own = config.supervisor
    # The ranks of several hosts load the model, and rank 0 joins, only after all hosts have met.
    meeting_s = RENDEZVOUS_S if config.learner.nodes > 1 else 0.0
    return Limits(
        broker_start_s=BROKER_START_S,
        silence_s=own.silence_s,
        computing_silence_s=own.computing_silence_s,
        start_s=own.start_timeout_s,
        learner_start_s=own.start_timeout_s + meeting_s,
        generator_stall_s=config.generator.stall_timeout_s + STALL_MARGIN_S,
        learner_stall_s=own.learner_stall_s,
    )


def crowded(config: RunConfig, cores: int) -> bool:
    """Return whether more threads compute at a time than there are cores.

    In lockstep learner and generators alternate.
    """
    learner = config.learner.threads_used * config.learner.processes
    here = config.generator.backend == "vllm"
    own = config.generator
    generators = own.threads_used * own.tensor_parallel_size * own.count if here else 0
    generators += config.judge.threads if config.judge else 0
    return (learner + generators if config.run.mode == "async" else max(learner, generators)) > cores


def environment(config: RunConfig, threads: int) -> dict[str, str]:
    """Return the environment of a role in a run whose roles all share this machine."""
    return role_environment(
        threads,
        local_model=config.local_models,
        crowded=crowded(config, usable_cores()),
    )


def gpu_environment(post: Post, placed: Placement, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment by which a process finds its GPUs; empty if it has none.

    Args:
        gpus: names of the visible GPUs.
    """
    found = placed.environment(post.name, gpus)
    if found and post.name == LEARNER and not any(name in os.environ for name in ALLOCATOR):
        # Batches differ in length, and blocks that grow leave fewer gaps between them. What the user has set wins.
        found[ALLOCATOR[0]] = "expandable_segments:True"
    return found


def lock_environment(post: Post, placed: Placement, config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the environment by which a process finds the lock on shared GPUs; empty if it needs none.

    Args:
        config: with "auto" decided, see `launch.hardware`.
        folder: run folder.
    """
    asleep = placed.sleepers(config)
    return gpu_lock(folder) if asleep and post.name in (LEARNER, *asleep) else {}


def how_it_ended(post: Post, folder: Path) -> str:
    """Return in words how a process ended, with the reason if it left one in the run folder."""
    assert post.child is not None
    code = post.child.process.poll()
    if post.why:
        return f"{post.name} {post.why}"
    if code is None:
        return f"{post.name} has not answered for {BROKER_START_S:g} s (if this machine is busy, try again)"
    if code < 0:
        starved = code == -signal.SIGKILL and oom_kills() > post.child.oom_kills
        why = ", most likely by the kernel, because the host ran out of memory" if starved else ""
        return f"{post.name} was ended by {signal.strsignal(-code)} (signal {-code}){why}"
    reason = short_of_memory(post, folder) or exit_codes.read_reason(folder, post.name)
    return f"{post.name} ended with code {code}{f': {reason}' if reason else ''}"


def failure(post: Post, folder: Path) -> RoleFailed:
    """Return the error that says how a process ended: in its own words, or with the end of its log."""
    assert post.child is not None
    how = how_it_ended(post, folder)
    if not post.why and exit_codes.read_reason(folder, post.name):
        return RoleFailed(f"{how} (log: {post.child.log})")
    return RoleFailed(with_tail(how, post.child.log))


def final(post: Post, folder: Path) -> bool:
    """Return whether the process ended with an error that another start would repeat."""
    assert post.child is not None
    if post.why:
        return False
    code = post.child.process.returncode
    return exit_codes.FINAL in (code, exit_codes.read_note(folder, post.name)) or bool(
        short_of_memory(post, folder)
    )


def short_of_memory(post: Post, folder: Path) -> str:
    """Return in words that a process had too little memory, and the cure; "" if its log does not say so."""
    if post.child is None or not post.child.process.returncode:
        return ""
    reason = exit_codes.read_reason(folder, post.name)
    return too_little_memory(role_of(post.name), reason, post.child.own_tail(LINES))
