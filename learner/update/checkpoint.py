"""Parts that a rank puts into a checkpoint: weights and optimizer as parts of parameters, and its state beside them.

All files of a checkpoint are on disk before one rename moves the pointer to it (`learner.checkpoint_files`). So after
a crash at any moment, either the previous checkpoint or this one is in force.
docs/understand/exactly-once.md explains why that matters.

Weights and optimizer are one safetensors file for each rank, which any number of ranks can read. Each rank writes the
part of every trained parameter that it keeps, at its place in the flattened parameter::

    place/NAME        int64 [3]: start of the part, numbers of the whole parameter, optimizer steps
    weight/NAME       float32 [n]: the weight itself, from which lower precision is rounded
    exp_avg/NAME      float32 [n]: AdamW's average of the gradient; absent before the first step
    exp_avg_sq/NAME   float32 [n]: AdamW's average of the squared gradient; absent before the first step

A rank that resumes reads its own parts out of all files. So a run may go on with a different number of ranks, or at
a different ZeRO stage, without a change of any bit.

DeepSpeed keeps float32 weights and AdamW's averages in flat tensors, of which each holds parts of many parameters. At
stage 0 every rank keeps every parameter whole; at stages 1 and 2 a rank has a stretch of all parameters in a row; at
stage 3 it has a stretch of each parameter.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from learner.checkpoint_files import cure
from learner.errors import CheckpointError
from learner.update.adaptive import AdaptiveState
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


class _Stretch(NamedTuple):
    """A part of a parameter in a flat tensor."""

    name: str
    start: int
    """Index of its first number in the flattened parameter."""
    whole: int
    """Numbers of the whole parameter."""
    offset: int
    """Index of its first number in the flat tensor."""
    length: int

    def cut_from(self, flat: Tensor) -> Tensor:
        """Return the part as a view."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


def parts_to_save(engine: Any) -> list[ShardPart]:
    """Return the parts that this rank saves, as views. Every part of a parameter is saved by one rank."""
    if engine.zero_optimization_stage() == 0 and dist.get_rank() > 0:
        return []
    found = []
    for flat, stretches in _flat_tensors(engine):
        state = _adamw(engine).state.get(flat, {})
        kinds = {"weight": flat} | {kind: state[kind] for kind in MOMENTS if kind in state}
        steps = int(state.get("step", 0))
        for stretch in stretches:
            tensors = {kind: stretch.cut_from(tensor) for kind, tensor in kinds.items()}
            found.append(ShardPart(stretch.name, stretch.start, stretch.whole, steps, tensors))
    return found


@torch.no_grad()
def restore_parts(engine: Any, reader: ShardReader) -> None:
    """Set weights and optimizer to those of a checkpoint. This is a collective call.

    Raises:
        CheckpointError: the checkpoint is of a different model, or a file is missing.
    """
    reader.check(sizes_of(engine.module.named_parameters()))
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    for flat, stretches in _flat_tensors(engine):
        state = _adamw(engine).state[flat]
        if "step" not in state:
            # AdamW makes them at its first step, in the same way.
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            state |= {kind: torch.zeros_like(flat, requires_grad=False) for kind in MOMENTS}
        kinds = {"weight": flat} | {kind: state[kind] for kind in MOMENTS}
        steps = [
            reader.fill(stretch.name, stretch.start, {kind: stretch.cut_from(t) for kind, t in kinds.items()})
            for stretch in stretches
        ]
        state["step"].fill_(max(steps, default=0))
    # The weights that the model computes with are rounded from the float32 ones that the optimizer keeps.
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()


def _adamw(engine: Any) -> Any:
    """Return torch's optimizer inside an engine."""
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer


def _flat_tensors(engine: Any) -> Iterator[tuple[Tensor, list[_Stretch]]]:
    """Yield each tensor that torch's optimizer of this rank steps, and where parts of parameters are in it."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        for group in optimizer.param_groups:
            for p in group["params"]:
                yield p, [_Stretch(names[id(p)], 0, p.numel(), 0, p.numel())]
    elif stage < 3:
        for flat, group in zip(
            optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True
        ):
            yield flat, [_mapped(names[id(p)], p) for p in group if p._hp_mapping is not None]
    else:
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            yield flat, list(_in_a_row(names, group))


def _mapped(name: str, p: Any) -> _Stretch:
    """Return the part of a parameter at stages 1 and 2, where DeepSpeed knows its place."""
    inside, flat = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
    return _Stretch(name, inside.start, p.numel(), flat.start, flat.numel)


def _in_a_row(names: dict[int, str], group: list[Any]) -> Iterator[_Stretch]:
    """Yield the parts of parameters at stage 3; each rank has as many numbers, the last ones are padding."""
    offset = 0
    for p in group:
        share = p.partition_numel()
        start = dist.get_rank() * share
        length = min(share, p.ds_numel - start)
        if length > 0:
            yield _Stretch(names[id(p)], start, p.ds_numel, offset, length)
        offset += share


class RankState(Struct, frozen=True, kw_only=True):
    """State of one rank beside weights and optimizer."""

    ranks: int
    """Ranks of the learner that wrote the checkpoint."""
    dtype: str
    lora: str = ""
    """Settings of the adapters, which are then all that is saved of the policy; "" if all its weights are."""
    base: str = ""
    """Hash of the weights that the adapters belong to, which are not in the checkpoint."""
    updates: int
    optimizer_steps: int
    adaptive: AdaptiveState
    formulas: dict[str, str] = {}
    """Hashes of the files of the user's own formulas, by the sections that name them."""
    torch_rng: bytes
    numpy_rng: tuple[str, bytes, int, int, float]
    python_rng: tuple[int, list[int], float | None]
    client: dict[str, Any]


def capture(
    *,
    ranks: int,
    dtype: str,
    lora: str = "",
    base: str = "",
    updates: int,
    optimizer_steps: int,
    adaptive: AdaptiveState,
    client: dict[str, Any],
    formulas: dict[str, str] | None = None,
) -> RankState:
    """Return the state of this rank now, the states of its random generators included."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return RankState(
        ranks=ranks,
        dtype=dtype,
        lora=lora,
        base=base,
        updates=updates,
        optimizer_steps=optimizer_steps,
        adaptive=adaptive,
        formulas=formulas or {},
        torch_rng=torch.get_rng_state().numpy().tobytes(),
        numpy_rng=(str(kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)),
        python_rng=(version, list(internal), gauss),
        client=client,
    )


def restore_random(state: RankState) -> None:
    """Set the random generators of this process to the stored states."""
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_rng), dtype=torch.uint8))
    kind, keys, position, has_gauss, cached = state.numpy_rng
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state.python_rng
    random.setstate((version, tuple(internal), gauss))


def changed_formulas(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a sentence for each formula of the user's own that is not the one with which a checkpoint was written.

    Example:
        >>> changed_formulas({"learner.reward.own": "0a"}, {"learner.reward.own": "0b"})
        ['the file of learner.reward.own has changed: the checkpoint was written with 0a, this process has 0b']
        >>> changed_formulas({}, {})
        []
    """
    return [
        f"the file of {place} has changed: the checkpoint was written with {before.get(place) or 'no such formula'}, "
        f"this process has {now.get(place) or 'no such formula'}"
        for place in sorted({*before, *now})
        if before.get(place) != now.get(place)
    ]


def write_state(folder: Path, name: str, rank: int, state: RankState) -> None:
    """Write a rank's state into a checkpoint."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / f"offbeat-rank{rank}.msgpack").write_bytes(msgspec.msgpack.encode(state))


def read_state(
    folder: Path, name: str, rank: int, *, dtype: str, lora: str = "", base: str = ""
) -> RankState:
    """Return the stored state of a rank; that of rank 0 for a rank that there was not when the checkpoint was written.

    Raises:
        CheckpointError: the file is unreadable, or was written with a different dtype, adapters, or weights that the
            adapters belong to.
    """
    state = _decoded(folder, name, 0)
    if 0 < rank < state.ranks:
        state = _decoded(folder, name, rank)
    if state.dtype != dtype:
        raise CheckpointError(
            f"{folder / name} was written with learner.dtype = {state.dtype!r}, this run has {dtype!r}; resume with "
            "the former"
        )
    if state.lora != lora:
        theirs, ours = (words or "none" for words in (state.lora, lora))
        raise CheckpointError(
            f"{folder / name} was written with learner.lora: {theirs}; this run has: {ours}; resume with the former"
        )
    if state.base != base:
        raise CheckpointError(
            f"{folder / name} holds adapters only, and the weights that they belong to are not those of the model "
            "folder; resume with the model that the run began with"
        )
    return state


def _decoded(folder: Path, name: str, rank: int) -> RankState:
    path = folder / name / f"offbeat-rank{rank}.msgpack"
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=RankState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}; {cure(folder, name)}") from None
