"""Plugin that vLLM loads in each of its processes, so that an engine ends with its generator and may record experts.

With tensor parallelism the engine's process holds no worker, so the code of `actors.generator.vllm_engine.worker` runs
only in its children. These end with it, but without this plugin it would outlive a generator that is killed,
and hold its devices. It would also refuse to record experts on a CPU.
"""

import os
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
    parent = os.environ.get(PARENT, "")
    if not parent:
        return
    if str(os.getppid()) == parent:
        die_with_parent(int(parent))
    allow_on_cpu()


def is_registered() -> bool:
    """Return whether vLLM finds this plugin: it does once Offbeat is installed, also in an editable way."""
    return any(found.module == __name__ for found in entry_points(group="vllm.general_plugins"))
