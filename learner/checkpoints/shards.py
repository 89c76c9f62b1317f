"""Weights and optimizer of a checkpoint: one safetensors file for each rank, which any number of ranks can read.

Each rank writes the part of every trained parameter that it keeps, at its place in the flattened parameter::

    place/NAME        int64 [3]: start of the part, numbers of the whole parameter, optimizer steps
    weight/NAME       float32 [n]: the weight itself, from which lower precision is rounded
    exp_avg/NAME      float32 [n]: AdamW's average of the gradient; absent before the first step
    exp_avg_sq/NAME   float32 [n]: AdamW's average of the squared gradient; absent before the first step

A rank that resumes reads its own parts out of all files. So a run may go on with a different number of ranks, or at
a different ZeRO stage, without a change of any bit.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.errors import CheckpointError
from protocol.files import whole_file
from protocol.weights.format import layout

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's averages, which torch has, too."""


class ShardPart(NamedTuple):
    """The part of a trained parameter that one rank keeps."""

    name: str
    start: int
    """Index of its first number in the flattened parameter."""
    whole: int
    """Numbers of the whole parameter."""
    steps: int
    """Optimizer steps so far."""
    tensors: dict[str, Tensor]
    """Float32 [n] each: "weight", and `MOMENTS` if there are any."""


def shard_file(folder: Path, model: str, rank: int) -> Path:
    """Return the file of a rank.

    Args:
        folder: folder of the checkpoint.
        model: "policy" or "critic".

    Example:
        >>> shard_file(Path("step00000012"), "policy", 1).name
        'policy-rank1.safetensors'
    """
    return folder / f"{model}-rank{rank}.safetensors"


def write_shard(path: Path, parts: Sequence[ShardPart]) -> None:
    """Write the parts of a rank. One tensor at a time is copied, none twice."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors[f"place/{part.name}"] = torch.tensor([part.start, part.whole, part.steps])
        tensors |= {f"{kind}/{part.name}": tensor for kind, tensor in part.tensors.items()}
    dtypes = {torch.int64: "I64", torch.float32: "F32"}
    header, _ = layout({name: (dtypes[t.dtype], tuple(t.shape)) for name, t in tensors.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial, open(partial, "wb") as file:
        file.write(header)
        for tensor in tensors.values():
            file.write(tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().data)


class _Place(NamedTuple):
    """A part in an open file."""

    file: Any
    start: int
    length: int
    whole: int
    steps: int


class ShardReader:
    """Reads any part of any parameter out of the files of all ranks. Only what is asked for is read.

    Args:
        folder: folder of the checkpoint.
        model: "policy" or "critic".

    Raises:
        CheckpointError: there are no such files.
    """

    def __init__(self, folder: Path, model: str) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._places: dict[str, list[_Place]] = {}
        files = sorted(folder.glob(f"{model}-rank*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{folder} has no file {shard_file(folder, model, 0).name}: an earlier version of Offbeat wrote it, or "
                f"a run without a {model}; go on with that version, or start anew, without --resume"
            )
        for path in files:
            file: Any = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition("/")
                if kind == "place":
                    start, whole, steps = file.get_tensor(key).tolist()
                    (count,) = file.get_slice(f"weight/{name}").get_shape()
                    self._places.setdefault(name, []).append(_Place(file, start, count, whole, steps))

    def sizes(self) -> dict[str, int]:
        """Return how many numbers each parameter has, by its name."""
        return {name: places[0].whole for name, places in self._places.items()}

    def check(self, sizes: dict[str, int]) -> None:
        """Compare the parameters of a model with those in the files.

        Args:
            sizes: numbers of each trained parameter of the model, by its name.

        Raises:
            CheckpointError: the model trains other parameters, or parameters of other sizes.
        """
        stored = self.sizes()
        if differ := sorted(name for name in sizes.keys() | stored if sizes.get(name) != stored.get(name)):
            name = differ[0]
            raise CheckpointError(
                f"{self._folder} has {stored.get(name, 'no')} numbers of {name}, this run's model has "
                f"{sizes.get(name, 'none')}; resume with the model and the critic that the run began with"
            )

    def fill(self, name: str, start: int, tensors: dict[str, Tensor]) -> int:
        """Copy a part of a parameter into tensors, in place; averages that are in no file become 0.

        Args:
            start: index of the part's first number in the flattened parameter.
            tensors: flat tensors of equal length, by kind, see `ShardPart`.

        Returns:
            Optimizer steps of the parameter.

        Raises:
            CheckpointError: the files do not have all of the part.
        """
        missing = count = len(tensors["weight"])
        steps = 0
        for place in self._places.get(name, ()):
            low, high = max(start, place.start), min(start + count, place.start + place.length)
            if low >= high:
                continue
            missing -= high - low
            steps = max(steps, place.steps)
            present = place.file.keys()
            for kind, tensor in tensors.items():
                target, key = tensor[low - start : high - start], f"{kind}/{name}"
                if key in present:
                    target.copy_(place.file.get_slice(key)[low - place.start : high - place.start])
                else:
                    target.zero_()
        if missing:
            raise CheckpointError(
                f"{self._folder} lacks {missing} of {count} numbers of {name}: the file of a rank is not there"
            )
        return steps


def sizes_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the numbers of each parameter that is trained, also where DeepSpeed has cut it."""
    return {name: getattr(p, "ds_numel", p.numel()) for name, p in named if p.requires_grad}
