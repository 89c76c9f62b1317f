"""Publishing a version: how long the learner stands, and copies of the same bytes and nothing else.

The learner stands until its copies are queued. The device goes on with other work beside them, and the next optimizer
step waits until they are done. Both are measured, and the time until the version is announced.
"""

import shutil
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.setting import GpuSetting
from benchmarks.report import Figure
from learner.publisher import Publisher
from learner.run_files import weights_folder
from learner.weight_copy import CopyStream, OutgoingWeights, register
from protocol.messages.peers import PublishWeights
from protocol.weights.files import verify
from protocol.weights.format import DATA, Shapes, read_manifest

PIECES = 64
"""Tensors of a version."""


def make_tensors(setting: GpuSetting, nbytes: int) -> tuple[Shapes, dict[str, torch.Tensor]]:
    """Return the shapes and tensors of a version of about this size, in bfloat16 on the device."""
    count = nbytes // 2 // PIECES
    shapes = {f"layer.{i}": ("BF16", (count,)) for i in range(PIECES)}
    generator = torch.Generator(setting.device).manual_seed(0)
    return shapes, {
        name: torch.randn(count, device=setting.device, generator=generator).bfloat16() for name in shapes
    }


def sizes(setting: GpuSetting) -> tuple[int, ...]:
    """Return the bytes of the versions that are measured."""
    return (2**16,) if setting.tiny else (1_200_000_000, 8_000_000_000)


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure versions of each size."""
    return [figure for nbytes in sizes(setting) for figure in publish(setting, nbytes)]


def publish(setting: GpuSetting, nbytes: int) -> list[Figure]:
    """Publish versions as a learner does, each with room made ahead, and copy the same bytes plainly."""
    shapes, tensors = make_tensors(setting, nbytes)
    stream = CopyStream(setting.device) if setting.cuda else None
    run_dir = setting.folder / "publish"
    run_dir.mkdir(exist_ok=True)
    publisher = Publisher("benchmark", run_dir, epoch=1, keep=1, register=register if setting.cuda else None)
    stood, copied, announced = list[float](), list[float](), list[float]()
    told: list[PublishWeights] = []
    try:
        # The first version finds no room made ahead, the second is a warm-up.
        for version in range(1, setting.repetitions + 3):
            publisher.await_tidied()
            setting.settle()
            began = time.perf_counter()
            publisher.publish(version, OutgoingWeights(shapes, tensors.items(), stream), announce=told.append)
            stood.append(time.perf_counter() - began)
            setting.settle()
            copied.append(time.perf_counter() - began)
            publisher.settle()
            announced.append(time.perf_counter() - began)
        check(Path(told[-1].manifest), shapes, tensors)
    finally:
        publisher.close()
        shutil.rmtree(weights_folder(run_dir), ignore_errors=True)
    plain = copies(setting, list(tensors.values()))
    where = f"{nbytes / 1e9:.3g} GB"
    pinned = ("pinned copy", plain["pinned"])
    return [
        Figure(f"publish {where}: learner stands", "s", stood[2:], *pinned),
        Figure(f"publish {where}: copied", "s", copied[2:], *pinned),
        Figure(f"publish {where}: announced", "s", announced[2:], *pinned),
        Figure(f"copy {where}: pageable, kept", "s", plain["pageable, kept"], *pinned),
        Figure(f"copy {where}: pageable, fresh", "s", plain["pageable, fresh"], *pinned),
    ]


def copies(setting: GpuSetting, tensors: list[torch.Tensor]) -> dict[str, list[float]]:
    """Return the seconds of plain copies of all tensors from the device, by the kind of memory."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    pinned, pageable = setting.pinned(nbytes), torch.zeros(nbytes, dtype=torch.uint8)

    def into(target: torch.Tensor) -> None:
        place = 0
        for tensor in tensors:
            target[place : place + tensor.nbytes].copy_(tensor.view(torch.uint8), non_blocking=True)
            place += tensor.nbytes

    return setting.in_turns(
        {
            "pinned": partial(into, pinned),
            "pageable, kept": partial(into, pageable),
            "pageable, fresh": lambda: [tensor.to("cpu", copy=True) for tensor in tensors],
        }
    )


def check(manifest: Path, shapes: Shapes, tensors: dict[str, torch.Tensor]) -> None:
    """Check that the published file holds the tensors.

    Raises:
        RuntimeError: it holds something else.
    """
    found = read_manifest(manifest)
    with open(manifest.with_name(DATA), "rb") as data:
        verify(found, data, shapes)
        content = data.read()
    for place in found.tensors:
        expected = tensors[place.name].view(torch.uint8).cpu().numpy().tobytes()
        if content[place.offset : place.offset + place.nbytes] != expected:
            raise RuntimeError(f"the published {place.name} is not what the device holds")
