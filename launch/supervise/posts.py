"""The posts of a run: which processes there are, how each is started, how one ended, and whether memory ran short."""

import os
import re
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from launch import errors
from launch.errors import RoleFailed
from launch.placement import Placement, peer_name
from launch.processes import (
    RENDEZVOUS_S,
    Child,
    Ranks,
    dump_stacks,
    gpu_lock,
    kill,
    oom_kills,
    ranks_of,
    role_environment,
    usable_cores,
    with_tail,
)
from launch.run_file.sections import RunConfig
from launch.servers import JUDGE, WEIGHTS
from launch.supervise.health import BROKER, STALL_MARGIN_S, Limits, Patience, RestartBackoff, role_of

LOG_LINES = 60
"""Last lines of an engine's log that are looked at. A traceback of the engine and that of its parent fit."""
OWN_ERRORS = ("OutOfMemoryError:", "MemoryError:", "RuntimeError:", "OSError:", "AcceleratorError:")
"""Types of errors, before their text, in the reason of a learner that had too little memory. Other errors may repeat
what the code of a user said."""


class Shortage(NamedTuple):
    """A shortage of memory: the pattern of its line in the log, the roles that have it, and the cure."""

    pattern: re.Pattern[str]
    roles: tuple[str, ...]
    cure: str


_ENGINES = ("generator", "judge")
_OUT = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError"
)
SHORTAGES = (
    Shortage(
        re.compile(r"Free memory on device .* less than desired GPU memory utilization"),
        _ENGINES,
        "other processes hold memory of this GPU: lower generator.gpu_memory_utilization, or give the engine a GPU of "
        "its own (docs/run/gpus.md)",
    ),
    Shortage(
        re.compile(r"No available memory for the cache blocks|KV cache is needed, which is larger than"),
        _ENGINES,
        "raise generator.gpu_memory_utilization (on a CPU generator.kv_cache_mb), or lower generator.max_model_len",
    ),
    Shortage(
        re.compile(r"No space left on device.*/dev/shm"),
        ("learner",),
        "shared memory is full, which holds learner.keep_versions versions and one more: make it larger (in a "
        "container with --shm-size), lower learner.keep_versions, or set learner.publish_dtype to bfloat16",
    ),
    Shortage(
        re.compile(
            r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError"
        ),
        ("learner",),
        "lower learner.micro_batch_tokens, set learner.gradient_checkpointing, or use more ranks (learner.processes) "
        "with learner.zero_stage = 3; learner.offload moves the optimizer to the host's memory",
    ),
    Shortage(
        re.compile(
            r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError"
        ),
        _ENGINES,
        "lower generator.max_num_seqs or generator.gpu_memory_utilization (on a CPU generator.kv_cache_mb), or raise "
        "generator.tensor_parallel_size",
    ),
)


def too_little_memory(role: str, reason: str, log: str) -> str:
    """Return the line that tells of too little memory, with the cure; "" if there is none.

    Args:
        role: role of the process.
        reason: reason that the process left, see `launch.errors`; "" if it left none.
        log: last lines of its log, those of an earlier process of this name left out.

    Example:
        >>> too_little_memory("learner", "OutOfMemoryError: CUDA out of memory.", "")[:46]
        'too little memory (OutOfMemoryError: CUDA out '
        >>> too_little_memory("learner", "all episodes fail: MemoryError", "MemoryError")
        ''
    """
    lines = log.splitlines()[-LOG_LINES:]
    if role == "learner" and reason:
        lines = [reason] if reason.startswith(OWN_ERRORS) else []
    for shortage in SHORTAGES:
        if role in shortage.roles:
            for line in reversed(lines):
                if shortage.pattern.search(line):
                    return f"too little memory ({line.strip()[:300]}); {shortage.cure}"
    return ""


LEARNER = "learner"
ACTOR = "actor"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's GPU memory: the present name and the former one."""
ENGINE_NOT_STARTED = "Engine core initialization failed"
"""vLLM's words for an engine that ended before it served; the cause is in its log only."""
ERROR_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|NotFound): .+")
BROKER_START_S = 120.0
"""Longest wait for the first answer of a broker, because reading a long journal takes a while."""


MAX_ENDINGS = 50


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
    started_at: float | None = None
    """Wall clock at the start of the process, in seconds since 1970 (UTC), for the record of the run."""
    endings: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_ENDINGS))
    """Wall clock at the end of earlier processes here, and why they ended: the newest of those that start again."""

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    # --- its start ----------------------------------------------------------------------------------------

    def gpu_environment(self, placed: Placement, gpus: Sequence[str]) -> dict[str, str]:
        """Return the environment by which a process finds its GPUs; empty if it has none.

        Args:
            gpus: names of the visible GPUs.
        """
        found = placed.environment(self.name, gpus)
        if found and self.name == LEARNER and not any(name in os.environ for name in ALLOCATOR):
            # Batches differ in length, and blocks that grow leave fewer gaps between them. What the user has set wins.
            found[ALLOCATOR[0]] = "expandable_segments:True"
        return found

    def lock_environment(self, placed: Placement, config: RunConfig, folder: Path) -> dict[str, str]:
        """Return the environment by which a process finds the lock on shared GPUs; empty if it needs none.

        Args:
            config: with "auto" decided, see `launch.preflight.hardware`.
            folder: run folder.
        """
        asleep = placed.sleepers(config)
        return gpu_lock(folder) if asleep and self.name in (LEARNER, *asleep) else {}

    def began(self, child: Child) -> None:
        """Note the process that runs there now."""
        self.child, self.due, self.why = child, None, ""
        self.started_at = round(time.time(), 3)

    def plan_restart(self, why: str, now: float, patience: Patience) -> bool:
        """Plan the next start of a process that has ended; return False if it has been started too often in a row."""
        assert self.child is not None
        lived_s = now - self.child.started
        self.endings.append((round(time.time(), 3), why))
        self.due = self.backoff.ended(why, lived_s=lived_s, now=now, patience=patience)
        return self.due is not None

    def put_off(self, until: float) -> None:
        """Plan a start that was not possible for a later time."""
        self.due = until

    # --- its end ------------------------------------------------------------------------------------------

    def kill(self, hung: str = "") -> bool:
        """Kill the process, and have it say before where its threads stand. Return whether it is gone.

        Args:
            hung: why it counts as hung; "": it has done its work and does not exit.
        """
        assert self.child is not None
        if hung:
            self.why = f"hung: {hung}"
        dump_stacks(self.child)
        return kill(self.child)

    def how_it_ended(self, folder: Path) -> str:
        """Return in words how a process ended, with the reason if it left one in the run folder."""
        assert self.child is not None
        code = self.child.process.poll()
        if self.why:
            return f"{self.name} {self.why}"
        if code is None:
            return (
                f"{self.name} has not answered for {BROKER_START_S:g} s (if this machine is busy, try again)"
            )
        if code < 0:
            starved = code == -signal.SIGKILL and oom_kills() > self.child.oom_kills
            why = ", most likely by the kernel, because the host ran out of memory" if starved else ""
            return f"{self.name} was ended by {signal.strsignal(-code)} (signal {-code}){why}"
        reason = self.short_of_memory(folder) or errors.read_reason(folder, self.name)
        if ENGINE_NOT_STARTED in reason and (cause := root_cause(self.child.own_tail(LOG_LINES))):
            reason += f" ({cause})"
        return f"{self.name} ended with code {code}{f': {reason}' if reason else ''}"

    def repeats(self, why: str) -> bool:
        """Return whether a generator's engine could not start twice in a row, for the same reason.

        Such an engine has not served yet, so nothing that another start would find has changed.
        """
        earlier = self.backoff.reasons[-1:]
        return ENGINE_NOT_STARTED in why and earlier == [why]

    def failure(self, folder: Path) -> RoleFailed:
        """Return the error that says how a process ended: in its own words, or with the end of its log."""
        assert self.child is not None
        how, final = self.how_it_ended(folder), self.is_final(folder)
        if not self.why and errors.read_reason(folder, self.name):
            return RoleFailed(f"{how} (log: {self.child.log})", final=final)
        return RoleFailed(with_tail(how, self.child.log), final=final)

    def is_final(self, folder: Path) -> bool:
        """Return whether the process ended with an error that another start would repeat."""
        assert self.child is not None
        if self.why:
            return False
        code = self.child.process.returncode
        return errors.FINAL in (code, errors.read_note(folder, self.name)) or bool(
            self.short_of_memory(folder)
        )

    def short_of_memory(self, folder: Path) -> str:
        """Return in words that a process had too little memory, and the cure; "" if its log does not say so."""
        if self.child is None or not self.child.process.returncode:
            return ""
        reason = errors.read_reason(folder, self.name)
        return too_little_memory(role_of(self.name), reason, self.child.own_tail(LOG_LINES))


def posts(config: RunConfig) -> list[Post]:
    """Return the crew of a run. The broker is first; the others join it in any order."""
    learner = config.learner
    crew = [Post(BROKER, 1), Post(LEARNER, learner.threads_used, ranks=ranks_of(learner))]
    if config.weights.http:
        crew.append(Post(WEIGHTS, 1))
    if config.judge is not None:
        crew.append(Post(JUDGE, config.judge.threads))
    crew += [peer(config, "generator", i) for i in range(config.generator.count)]
    return crew + [peer(config, ACTOR, i) for i in range(config.actor.count)]


def posts_of_host(config: RunConfig, host: str, arguments: tuple[str, ...] = ()) -> list[Post]:
    """Return the crew of a further host: generators and actors, and the judge if there are actors.

    Args:
        host: name of the host.
        arguments: further arguments of each generator and actor.
    """
    crew = [Post(JUDGE, config.judge.threads)] if config.judge is not None and config.actor.count else []
    crew += [peer(config, "generator", i, host, arguments) for i in range(config.generator.count)]
    return crew + [peer(config, ACTOR, i, host, arguments) for i in range(config.actor.count)]


def peer(config: RunConfig, role: str, number: int, host: str = "", arguments: tuple[str, ...] = ()) -> Post:
    """Return the post of a generator or an actor."""
    name = peer_name(role, number, host)
    threads = config.generator.threads_used if role == "generator" else 1
    return Post(name, threads, ("--name", name, *arguments))


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


def root_cause(log: str) -> str:
    """Return the first error in a log that vLLM's own one points to as the root cause; "" if there is none.

    Example:
        >>> root_cause("(EngineCore) ERROR ImportError: no PIL\\nRuntimeError: Engine core initialization failed.")
        'ImportError: no PIL'
    """
    for line in log.splitlines():
        if (found := ERROR_LINE.search(line)) and ENGINE_NOT_STARTED not in line:
            return found[0].strip()[:300]
    return ""
