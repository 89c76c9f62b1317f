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
    if os.environ.get(PARENT):
        _die_with_generator()
        allow_on_cpu()


@cache
def prepare_forks() -> None:
    """Let each process that is forked off this one end with it, and leave this one's signals alone."""
    os.register_at_fork(after_in_child=_begin_fork)


def _begin_fork() -> None:
    # The event loop of the generator would take a signal of its engine for one of its own (until Python 3.12).
    signal.set_wakeup_fd(-1)
    _die_with_generator()


def _die_with_generator() -> None:
    if str(os.getppid()) == (parent := os.environ.get(PARENT, "")):
        die_with_parent(int(parent))


def is_registered() -> bool:
    """Return whether vLLM finds this plugin: it does once Offbeat is installed, also in an editable way."""
    return any(found.module == __name__ for found in entry_points(group="vllm.general_plugins"))
