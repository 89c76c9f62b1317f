"""The parts of weights and optimizer that this rank keeps in DeepSpeed, as views: to save them, and to restore them.

DeepSpeed keeps float32 weights and AdamW's averages in flat tensors, of which each holds parts of many parameters. At
stage 0 every rank keeps every parameter whole; at stages 1 and 2 a rank has a stretch of all parameters in a row; at
stage 3 it has a stretch of each parameter.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learner.checkpoints.shards import MOMENTS, ShardPart, ShardReader, sizes_of


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

    def of(self, flat: Tensor) -> Tensor:
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
            tensors = {kind: stretch.of(tensor) for kind, tensor in kinds.items()}
            found.append(ShardPart(stretch.name, stretch.start, stretch.whole, steps, tensors))
    return found


@torch.no_grad()
def restore(engine: Any, reader: ShardReader) -> None:
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
            reader.fill(stretch.name, stretch.start, {kind: stretch.of(t) for kind, t in kinds.items()})
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
