"""Finds in the log of a process that it had too little memory, and says which setting to change."""

import re
from typing import NamedTuple

LINES = 60
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
        reason: reason that the process left, see `launch.exit_codes`; "" if it left none.
        log: last lines of its log, those of an earlier process of this name left out.

    Example:
        >>> too_little_memory("learner", "OutOfMemoryError: CUDA out of memory.", "")[:46]
        'too little memory (OutOfMemoryError: CUDA out '
        >>> too_little_memory("learner", "all episodes fail: MemoryError", "MemoryError")
        ''
    """
    lines = log.splitlines()[-LINES:]
    if role == "learner" and reason:
        lines = [reason] if reason.startswith(OWN_ERRORS) else []
    for shortage in SHORTAGES:
        if role in shortage.roles:
            for line in reversed(lines):
                if shortage.pattern.search(line):
                    return f"too little memory ({line.strip()[:300]}); {shortage.cure}"
    return ""
