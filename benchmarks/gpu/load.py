"""Bringing a published file to the device, as a generator's engine does, and plain copies of the same bytes."""

from collections.abc import Callable
from functools import partial

import torch

from actors.generator.weights.staging import tensor_table
from actors.generator.weights.tensor_file import tensors_in
from actors.generator.weights.to_device import DeviceReader
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.publish import make_tensors, sizes
from benchmarks.gpu.setting import GpuSetting
from learner.publishing.weight_copy import OutgoingWeights
from protocol.weights.files import NewVersion
from protocol.weights.format import DATA

ROOM = 2**62
"""Free bytes that the reader is told of: all tensors shall go through its buffers."""
TINY_SLOT = 2**13


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure files of each size."""
    return [figure for nbytes in sizes(setting) for figure in load(setting, nbytes)]


def load(setting: GpuSetting, nbytes: int) -> list[Figure]:
    """Read the tensors of one file in three ways, and copy them to the tensors of a model.

    Raises:
        RuntimeError: the tensors that arrived are not those of the file.
    """
    shapes, tensors = make_tensors(setting, nbytes)
    root = setting.folder / "load"
    new = NewVersion(root, shapes)
    try:
        OutgoingWeights(shapes, tensors.items()).copy_into(new.memory, new.places, new.written)()
        path, manifest = new.finish(run="benchmark", epoch=1, version=1)
    except BaseException:
        new.discard()
        raise
    rows = tensor_table(manifest)
    file = path.with_name(DATA)
    data = torch.from_file(str(file), shared=False, size=manifest.nbytes, dtype=torch.uint8)
    reader = DeviceReader(setting.device, TINY_SLOT) if setting.tiny else DeviceReader(setting.device)
    model = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    pinned = setting.pinned(manifest.nbytes)
    pinned.copy_(data)

    def take(source: Callable[[], object]) -> None:
        for name, tensor in source():  # type: ignore[attr-defined]
            model[name].copy_(tensor, non_blocking=True)

    ours = partial(take, partial(reader.tensors, data, rows, ROOM))
    seconds = setting.in_turns(
        {
            "pinned": partial(take, partial(tensors_in, pinned, rows)),
            "from the file": partial(take, partial(tensors_in, data, rows)),
            "ours": ours,
        }
    )
    for tensor in model.values():
        tensor.zero_()
    setting.seconds(ours)
    if not all(torch.equal(model[name], tensor) for name, tensor in tensors.items()):
        raise RuntimeError("the tensors that arrived are not those of the file")
    where, bare = f"{nbytes / 1e9:.3g} GB", ("pinned copy", seconds["pinned"])
    return [
        Figure(f"load {where}: through pinned buffers", "s", seconds["ours"], *bare),
        Figure(f"load {where}: from the mapped file", "s", seconds["from the file"], *bare),
    ]
