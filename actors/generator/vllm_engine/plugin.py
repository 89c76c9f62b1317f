"""Plugin that vLLM loads in each of its processes: the engine's process ends with its generator.

With tensor parallelism the engine's process holds no worker, so the code of `actors.generator.vllm_engine.worker` runs
only in its children. These end with it, but without this plugin it would outlive a generator that is killed,
and hold its devices.
"""

import os
from importlib.metadata import entry_points

from protocol.orphans import die_with_parent

PARENT = "OFFBEAT_ENGINE_PARENT"
"""Environment variable with the process id of the generator. Engines of others do not have it."""


def end_with_generator() -> None:
    """Let this process end with its parent, if that is the generator.

    `pyproject.toml` names this function as an entry point of the group ``vllm.general_plugins``.
    """
    parent = os.environ.get(PARENT, "")
    if parent and str(os.getppid()) == parent:
        die_with_parent(int(parent))


def is_registered() -> bool:
    """Return whether vLLM finds this plugin: it does once Offbeat is installed, also in an editable way."""
    return any(found.module == __name__ for found in entry_points(group="vllm.general_plugins"))
