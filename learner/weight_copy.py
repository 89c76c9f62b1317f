"""Copies the weights of a model into the memory of a version.

On a CPU the copy is over when `OutgoingWeights.copy_into` returns. On a CUDA device the copies are queued on a
stream of their own, so the learner goes on at once; only its next optimizer step waits for them, on the device.
For that the memory has to be registered with the driver (`register`), which takes time and is done ahead.
Without that, each copy holds up the learner until it is done, and everything else is the same.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.weights.files import check_place
from protocol.weights.format import TORCH_DTYPES, Shapes, TensorSpec

log = logging.getLogger(__name__)

PORTABLE = 1
"""Flag of cudaHostRegister: every context of the process may copy to and from the memory."""


def rounded_shapes(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the shapes with dtype bfloat16 in place of float32.

    Example:
        >>> rounded_shapes({"a": ("F32", (2,)), "b": ("I64", (1,))})
        {'a': ('BF16', (2,)), 'b': ('I64', (1,))}
    """
    return {name: ("BF16" if dtype == "F32" else dtype, shape) for name, (dtype, shape) in shapes.items()}


class CopyStream:
    """A CUDA stream on which weights leave the device, while the device computes on.

    Args:
        device: CUDA device of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy, behind all work that was queued until now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The memory of a tensor that is merged, gathered or converted for the copy is not used again before it.
        source.record_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until the copies queued so far are done."""
        # Without `blocking` the thread that waits would keep a core busy.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._copied.record(self._stream)
        return self._copied.synchronize

    def hold(self) -> None:
        """Make the device wait for the copies before it does what is queued from now on. This returns at once."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


@dataclass(frozen=True)
class OutgoingWeights:
    """The tensors of a model in the order of their shapes, and how they leave it. They can be taken once."""

    shapes: Shapes
    """Dtype and shape of each tensor by name, as it is published; float32 may be rounded to bfloat16."""
    tensors: Iterable[tuple[str, Tensor]]
    """Names and tensors, in the order of the shapes; each is valid until the next is taken."""
    stream: CopyStream | None = None
    """Stream for tensors on a CUDA device; None: the learner stands until they are copied."""

    def copy_into(
        self, memory: memoryview, places: Sequence[TensorSpec], written: Callable[[int], None]
    ) -> Callable[[], None]:
        """Copy every tensor to its place, and return a function that waits until all have arrived.

        Args:
            memory: bytes of the file.
            places: places of the tensors, in the order of the shapes.
            written: called with the number of bytes of the file that are complete, where that is known at once.

        Raises:
            WeightsError: the tensors are not those of the places.
        """
        content = torch.frombuffer(memory, dtype=torch.uint8)
        for place, (name, tensor) in zip(places, self.tensors, strict=True):
            whole = tensor.detach().to(getattr(torch, TORCH_DTYPES[place.dtype])).contiguous()
            source = whole.reshape(-1).view(torch.uint8)
            check_place(place, name, source.nbytes)
            end = place.offset + place.nbytes
            if self.stream is None:
                content[place.offset : end].copy_(source)
                written(end)
            else:
                self.stream.copy(source, content[place.offset : end])
        return _nothing if self.stream is None else self.stream.mark()


def _nothing() -> None:
    """Wait for nothing, because the copy is over."""


def register(memory: memoryview) -> Callable[[], None]:
    """Register memory with the CUDA driver, so that copies into it run beside other work.

    Returns:
        The function that ends the registration. Where the driver refuses, it does nothing, and so did this call.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if failure := int(runtime.cudaHostRegister(address, memory.nbytes, PORTABLE)):
        log.warning(
            "CUDA cannot register shared memory (error %d), so the learner stands for each copy of its weights",
            failure,
        )
        return _nothing

    def end() -> None:
        runtime.cudaHostUnregister(address)

    return end
