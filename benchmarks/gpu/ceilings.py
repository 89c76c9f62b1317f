"""The fastest products and copies that this machine makes; other steps are compared with them."""

from functools import partial

import torch

from benchmarks.gpu.setting import GpuSetting
from benchmarks.report import Figure


def product_rate(setting: GpuSetting) -> list[float]:
    """Return the operations per second of a square matrix product, for each repetition."""
    size = 64 if setting.tiny else 8192
    a, b = (torch.randn(size, size, device=setting.device, dtype=setting.dtype) for _ in range(2))
    times = 1 if setting.tiny else 10

    def product() -> None:
        for _ in range(times):
            torch.mm(a, b)

    return [2 * size**3 * times / s for s in setting.in_turns({"product": product})["product"]]


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure products, copies on the device, and copies to and from the host."""
    nbytes = 2**16 if setting.tiny else 2 * 10**9
    on_device, other = (torch.zeros(nbytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
    pageable, pinned = torch.zeros(nbytes, dtype=torch.uint8), setting.pinned(nbytes)
    seconds = setting.in_turns(
        {
            "copy on the device": partial(other.copy_, on_device),
            "device to host, pageable, fresh": lambda: torch.empty(nbytes, dtype=torch.uint8).copy_(
                on_device
            ),
            "device to host, pageable, kept": partial(pageable.copy_, on_device),
            "device to host, pinned": partial(pinned.copy_, on_device, non_blocking=True),
            "host to device, pageable": partial(on_device.copy_, pageable),
            "host to device, pinned": partial(on_device.copy_, pinned, non_blocking=True),
        }
    )
    product = Figure(
        f"matrix product, {setting.dtype_name}", "Tflop/s", [rate / 1e12 for rate in product_rate(setting)]
    )
    copies = [Figure(name, "GB/s", [nbytes / 1e9 / s for s in taken]) for name, taken in seconds.items()]
    return [product, *copies]
