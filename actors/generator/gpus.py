"""Checks that an engine computes on the GPUs that its generator was given."""

from typing import Protocol

from actors.config import GeneratorConfig
from protocol.errors import GpuUnusable


class Platform(Protocol):
    """The part of vLLM's `current_platform` that is asked."""

    device_type: str

    def device_count(self) -> int:
        """Return the number of GPUs that vLLM sees."""
        ...


def check_platform(config: GeneratorConfig, platform: Platform) -> None:
    """Make sure that vLLM computes on GPUs if the generator was given some.

    vLLM takes the CPU, or nothing, where it finds no driver, or was built for the CPU.

    Raises:
        GpuUnusable: it does not; the generator must not compute on a CPU instead.
    """
    if not config.devices:
        return
    given = f"the generators were given GPUs ({', '.join(map(str, config.devices))})"
    cure = (
        'look at nvidia-smi, and install offbeat with the extra "gpu" into a virtual environment of its own'
    )
    if platform.device_type != "cuda":
        found = platform.device_type or "no device"
        raise GpuUnusable(f"{given}, but vLLM finds {found} to compute on; {cure}")
    if (count := platform.device_count()) < config.tensor_parallel_size:
        raise GpuUnusable(
            f"{given}, but vLLM sees {count} for this one, and generator.tensor_parallel_size is "
            f"{config.tensor_parallel_size}; {cure}"
        )
