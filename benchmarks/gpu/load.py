"""Bringing a published file to the device, as a generator's engine does, and plain copies of the same bytes."""

from collections.abc import Iterable

import torch

from actors.generator.weights.staging import tensor_table
from actors.generator.weights.tensors import DeviceReader, file_bytes, mapped, tensors_in
from benchmarks.gpu.publish import make_tensors, sizes
from benchmarks.gpu.setting import GpuSetting
from benchmarks.report import Figure
from learner.weight_copy import OutgoingWeights
from protocol.weights.files import NewVersion
from protocol.weights.format import DATA

ROOM = 2**62
"""Free bytes that the reader is told of: all tensors shall go through its buffers."""
TINY_SLOT = 2**13


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure files of each size."""
    return [figure for nbytes in sizes(setting) for figure in load(setting, nbytes)]


class Loads:
    """A published file, the tensors of a model on the device, and the ways to bring the one into the other.

    Args:
        nbytes: bytes of the file, about.
    """

    def __init__(self, setting: GpuSetting, nbytes: int) -> None:
        shapes, self.expected = make_tensors(setting, nbytes)
        new = NewVersion(setting.folder / "load", shapes)
        try:
            OutgoingWeights(shapes, self.expected.items()).copy_into(new.memory, new.places, new.written)()
            path, manifest = new.finish(run="benchmark", epoch=1, version=1)
        except BaseException:
            new.discard()
            raise
        self._file, self._rows = str(path.with_name(DATA)), tensor_table(manifest)
        self._reader = DeviceReader(setting.device, *((TINY_SLOT,) if setting.tiny else ()))
        self.model = {name: torch.zeros_like(tensor) for name, tensor in self.expected.items()}
        self._pinned = setting.pinned(manifest.nbytes)
        self._pinned.copy_(mapped(self._file))
        self._ahead = mapped(self._file)

    def map_ahead(self) -> None:
        """Map the file anew, as each version of a run is mapped once."""
        self._ahead = mapped(self._file)

    def from_pinned(self) -> None:
        """Copy the tensors out of pinned memory."""
        self._take(tensors_in(self._pinned, self._rows))

    def from_file(self) -> None:
        """Map the file page by page, and copy the tensors out of it."""
        self._take(tensors_in(file_bytes(self._file), self._rows))

    def ours(self) -> None:
        """Copy the tensors as an engine does, from the file that was mapped ahead."""
        self._take(self._reader.tensors(self._ahead, self._rows, ROOM))

    def _take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.model[name].copy_(tensor, non_blocking=True)


def load(setting: GpuSetting, nbytes: int) -> list[Figure]:
    """Bring the tensors of one file to the device in three ways.

    Raises:
        RuntimeError: the tensors that arrived are not those of the file.
    """
    loads = Loads(setting, nbytes)
    arms = {"pinned": loads.from_pinned, "from the file": loads.from_file, "ours": loads.ours}
    seconds = setting.in_turns(arms, before=loads.map_ahead)
    mapping = [setting.seconds(loads.map_ahead) for _ in range(setting.repetitions)]
    for tensor in loads.model.values():
        tensor.zero_()
    loads.ours()
    if not all(torch.equal(loads.model[name], tensor) for name, tensor in loads.expected.items()):
        raise RuntimeError("the tensors that arrived are not those of the file")
    where, bare = f"load {nbytes / 1e9:.3g} GB", ("pinned copy", seconds["pinned"])
    return [
        Figure(f"{where}: through pinned buffers", "s", seconds["ours"], *bare),
        Figure(f"{where}: from the file as it is", "s", seconds["from the file"], *bare),
        Figure(f"{where}: mapping the file ahead, while the engine samples", "s", mapping),
    ]
