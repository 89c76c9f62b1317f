"""Plugin that vLLM loads in each of its processes, so that an engine ends with its generator and may record experts.

With tensor parallelism the engine's process holds no worker, so the code of `actors.generator.vllm_engine.worker` runs
only in its children. These end with it, but without this plugin it would outlive a generator that is killed,
and hold its devices. It would also refuse to record experts on a CPU. An engine that was forked off the generator does
not load it, because the generator has; `prepare_forks` is for that one.
"""

import os
import signal
from functools import cache
from importlib.metadata import entry_points

from actors.generator.vllm_engine.routes import allow_on_cpu
from protocol.processes import die_with_parent

PARENT = "OFFBEAT_ENGINE_PARENT"
"""Environment variable with the process id of the generator. Engines of others do not have it."""


def end_with_generator() -> None:
    """Let this process end with its parent, if that is the generator, and let its engine record experts on a CPU.

    `pyproject.toml` names this function as an entry point of the group ``vllm.general_plugins``. In processes of other
    programs it does nothing.
    """
    if parent := os.environ.get(PARENT):
        if str(os.getppid()) == parent:
            die_with_parent(int(parent))
        allow_on_cpu()


@cache
def prepare_forks() -> None:
    """Let each process that is forked off this one end with it, and leave this one's signals alone."""
    generator = os.getpid()
    forks_now = generator

    def note() -> None:
        nonlocal forks_now
        forks_now = os.getpid()

    def begin_fork() -> None:
        # The event loop of the generator would take a signal of its engine for one of its own (until Python 3.12).
        signal.set_wakeup_fd(-1)
        # An engine's own forks have its copy of this hook. The generator may be dead by now.
        if forks_now == generator and os.environ.get(PARENT) == str(generator):
            die_with_parent(generator)

    os.register_at_fork(before=note, after_in_child=begin_fork)


def is_registered() -> bool:
    """Return whether vLLM finds this plugin: it does once Offbeat is installed, also in an editable way."""
    return any(found.module == __name__ for found in entry_points(group="vllm.general_plugins"))
