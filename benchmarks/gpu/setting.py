"""Device, sizes and clocks of a measurement."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class GpuSetting:
    """Where and how large a measurement is."""

    device: torch.device
    tiny: bool
    """True proves in seconds, on any machine, that the programs work. The figures then mean nothing."""
    repetitions: int
    folder: Path
    """Folder for versions and runs; it is removed after the step."""
    shelf: Path
    """Folder for models, which further steps use, too."""
    models: tuple[str, ...]
    """Names of the models in `benchmarks.gpu.models`."""
    quick: bool = False
    """Whether to measure fewer sizes, for a GPU that is there for minutes only."""

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the models: bfloat16 on a GPU."""
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def dtype_name(self) -> str:
        """The same dtype as the run file has it."""
        return "bfloat16" if self.cuda else "float32"

    def settle(self) -> None:
        """Wait until the device has done all that was queued."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds that a call takes, until the device has done all of it."""
        self.settle()
        began = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - began

    def in_turns(
        self, arms: Mapping[str, Callable[[], object]], before: Callable[[], object] = lambda: None
    ) -> dict[str, list[float]]:
        """Return the seconds of each arm and repetition. All run once before, and the order alternates.

        Args:
            before: called before each arm; its time does not count.
        """
        for call in arms.values():
            before()
            self.seconds(call)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for repetition in range(self.repetitions):
            for name in list(arms) if repetition % 2 else list(arms)[::-1]:
                before()
                found[name].append(self.seconds(arms[name]))
        return found

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return memory that the GPU can fetch by itself; on a CPU ordinary memory."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.cuda)

    def peak_memory(self) -> float | None:
        """Return the peak of torch's memory on the GPU in GB since `forget_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 1e9 if self.cuda else None

    def forget_peak(self) -> None:
        """Begin a new measurement of the peak."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
