"""The kernels of torch's attention beside each other, forward and backward, on long causal rows.

The learner uses scaled dot-product attention, and torch chooses the kernel. This step shows whether that choice is the
fastest one here. A kernel that this device or these lengths do not have is left out.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.setting import MODELS, GpuSetting, ModelShape
from benchmarks.report import Figure

log = logging.getLogger(__name__)

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
PLAIN_UP_TO = 8192
"""Length up to which the plain kernel is tried, because it holds the square of the length."""


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure one layer of each model at each length."""
    lengths = (64,) if setting.tiny else (8192, 32_768)
    return [
        figure for name in setting.models for length in lengths for figure in layer(setting, name, length)
    ]


def layer(setting: GpuSetting, name: str, length: int) -> list[Figure]:
    """Return the rates of all kernels for one row, beside that of the kernel that torch chooses."""
    shape = MODELS[name]
    inputs = make_inputs(setting, shape, length)
    arms: dict[str, Callable[[], object]] = {"torch's choice": partial(both_passes, inputs)}
    for kernel, backend in KERNELS.items():
        arm = partial(both_passes, inputs, backend)
        if (backend is not SDPBackend.MATH or length <= PLAIN_UP_TO) and runs(arm):
            arms[kernel] = arm
    seconds = setting.in_turns(arms)
    work = operations(shape, length)
    rates = {arm: [work / s / 1e12 for s in taken] for arm, taken in seconds.items()}
    chosen = rates.pop("torch's choice")
    where = f"attention of {name}, one row of {length}"
    return [
        Figure(f"{where}: torch's choice", "Tflop/s", chosen),
        *(
            Figure(f"{where}: {kernel}", "Tflop/s", rate, "torch's choice", chosen)
            for kernel, rate in rates.items()
        ),
    ]


def operations(shape: ModelShape, length: int) -> float:
    r"""Return the floating-point operations of both passes of one causal layer, without what is computed twice.

    .. math:: 3 \cdot 2 \cdot \text{heads} \cdot d_h \cdot \text{length}^2

    The forward pass has two products of 2 operations for each head, its width and pair of positions. Half of the pairs
    are masked. The backward pass has twice the operations of the forward pass.

    Example:
        >>> operations(ModelShape(256, 64, 2, 2, 1, 32, 128), 64) == 3 * 2 * 2 * 32 * 64**2
        True
    """
    return 3.0 * 2.0 * shape.heads * shape.head_dim * length**2


def make_inputs(setting: GpuSetting, shape: ModelShape, length: int) -> list[Tensor]:
    """Return query, key and value of one row, [1, heads, length, head width] each."""
    generator = torch.Generator(setting.device).manual_seed(0)
    return [
        torch.randn(
            (1, heads, length, shape.head_dim),
            device=setting.device,
            dtype=setting.dtype,
            generator=generator,
        ).requires_grad_()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]


def both_passes(inputs: list[Tensor], backend: SDPBackend | None = None) -> None:
    """Compute the attention of one row, and the gradient of its inputs.

    Args:
        backend: kernel; None: torch chooses.
    """
    query, key, value = inputs
    with nullcontext() if backend is None else sdpa_kernel([backend]):
        states = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.autograd.grad(states, inputs, torch.ones_like(states))


def runs(arm: Callable[[], object]) -> bool:
    """Return whether a kernel works here; if not, the log says why."""
    try:
        arm()
    except RuntimeError as error:
        log.info("left out: %s", " ".join(str(error).split())[:200])
        return False
    return True
