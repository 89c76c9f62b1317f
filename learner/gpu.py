"""Takes the GPU that a rank of the learner was given, and leaves room on it for generators that wake."""

import os

import torch
import torch.distributed as dist

from learner.settings.learner import LearnerConfig
from protocol.errors import GpuUnusable
from protocol.processes import VARIABLE


def take_gpu(config: LearnerConfig) -> None:
    """Make this rank's GPU the current one, and bound the memory of its tensors. Without GPUs, do nothing.

    Raises:
        GpuUnusable: the rank was given a GPU, but torch or DeepSpeed would not compute on it. It must not compute on a
            CPU instead.
    """
    if not config.devices:
        return
    if (accelerator := os.environ.get("DS_ACCELERATOR", "cuda")) != "cuda":
        raise GpuUnusable(
            f"the learner was given GPUs ({', '.join(map(str, config.devices))}), but DS_ACCELERATOR is "
            f'"{accelerator}" in its environment, so DeepSpeed would not compute on them; unset it'
        )
    place = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        # A GPU that the driver lists may still not compute: the build of torch may lack its kernels.
        torch.ones(1, device=f"cuda:{place}").add_(1).item()
    except (RuntimeError, AssertionError) as error:
        raise GpuUnusable(
            f"the learner was given GPUs ({', '.join(map(str, config.devices))}), but torch {torch.__version__} cannot "
            f"compute on its GPU {place}: {' '.join(str(error).split())[:400]}; look at nvidia-smi, and install "
            'offbeat with the extra "gpu" into a virtual environment of its own'
        ) from None
    torch.cuda.set_device(place)
    share = config.gpu_memory_utilization
    if not isinstance(share, str) and share < 1.0:
        # Without a bound, memory that torch keeps for later would be missing when the generator starts again.
        torch.cuda.set_per_process_memory_fraction(share, place)


def forget_peak_memory() -> None:
    """Begin a new measurement of the most memory in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def memory_metrics() -> dict[str, float]:
    """Return the metrics of this rank's GPU since `forget_peak_memory`; empty on a CPU, where nothing is measured."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "learner/gpu_memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "learner/gpu_memory_used_share": 1 - free / total,
    }


def make_room(ranks: int) -> None:
    """Give back memory that torch keeps for later, on all ranks, if generators wake on these GPUs now.

    It is a collective call: no generator may wake before the last rank has done so.
    """
    if VARIABLE not in os.environ:
        return
    torch.cuda.empty_cache()
    if ranks > 1:
        dist.barrier()
