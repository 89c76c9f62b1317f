"""The whole weights of a model that DeepSpeed may keep in shards, with adapters merged, as its folder has them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.model.lora import Adapter, adapters, published_name
from protocol.weights.format import TORCH_DTYPES

GATHER_BYTES = 64 * 2**20
"""Bytes of full parameters held at once when sharded ones are gathered; a larger tensor is gathered alone."""
SAFETENSORS_NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}


class _Weight(NamedTuple):
    """A tensor of the model, or of a shard of it, and the name that it gets outside."""

    name: str
    tensor: Tensor
    adapter: Adapter | None = None
    """Adapter that is merged into the tensor."""

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that must be gathered for `whole`."""
        return [self.tensor] if self.adapter is None else [self.tensor, self.adapter.down, self.adapter.up]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts when they are whole."""
        return sum(getattr(part, "ds_numel", part.numel()) * part.element_size() for part in self.parts)

    def whole(self) -> Tensor:
        """Return the tensor, with its adapter, on its device."""
        tensor = self.tensor.detach()
        return (tensor if self.adapter is None else self.adapter.merged(tensor)).contiguous()


def weight_shapes(engine: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``name -> (safetensors dtype, shape)`` with the names of the model's folder; tied tensors appear once."""
    weights = (
        (name, torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta"))
        for name, tensor, _ in _model_weights(engine)
    )
    return {
        name: (SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape))
        for whole in weights
        for name, tensor in as_in_folder(engine.module.lm, *whole)
    }


def gathered_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors in the order of `weight_shapes`, on their device. Each is valid until the next one.

    Adapters are merged into their layers. At stage 3 this is a collective call: every rank must iterate to the end.
    """
    for name, tensor in _gathered(engine, _model_weights(engine)):
        yield from as_in_folder(engine.module.lm, name, tensor)


def as_in_folder(lm: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of a model as its folder has it, under the folder's names.

    transformers keeps the experts of a mixture in one tensor. Folders, and vLLM, have a tensor for each expert.

    Args:
        lm: model of transformers, which knows how it was put together.
    """
    if not getattr(lm, "_weight_conversions", None):
        yield name, tensor
        return
    from transformers.core_model_loading import revert_weight_conversion

    for own, part in revert_weight_conversion(lm, {name: tensor}).items():
        yield own, part.contiguous()


def trained_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what training changes, on its device, under its names in the module: the adapters, or else all weights.

    At stage 3 this is a collective call, see `gathered_weights`.
    """
    lm = engine.module.lm
    if adapters(lm):
        trained = [_Weight(name, p) for name, p in lm.named_parameters() if p.requires_grad]
    else:
        trained = _model_weights(engine)
    yield from _gathered(engine, trained)


def _gathered(engine: Any, weights: list[_Weight]) -> Iterator[tuple[str, Tensor]]:
    if engine.zero_optimization_stage() < 3:
        for weight in weights:
            yield weight.name, weight.whole()
        return
    import deepspeed

    for bucket in _buckets(weights):
        sharded = [part for weight in bucket for part in weight.parts if hasattr(part, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded):
            for weight in bucket:
                yield weight.name, weight.whole()


def _model_weights(engine: Any) -> list[_Weight]:
    """Return the weights of the model without adapters, each with its adapter if it has one."""
    lm = engine.module.lm
    persistent = lm.state_dict(keep_vars=True).keys()
    buffers = [(name, buffer) for name, buffer in lm.named_buffers() if name in persistent]
    by_name = adapters(lm)
    own = {id(part) for adapter in by_name.values() for part in (adapter.down, adapter.up)}
    return [
        _Weight(published_name(name), tensor, by_name.get(name))
        for name, tensor in [*lm.named_parameters(), *buffers]
        if id(tensor) not in own
    ]


def _buckets(weights: list[_Weight]) -> Iterator[list[_Weight]]:
    bucket: list[_Weight] = []
    size = 0
    for weight in weights:
        if bucket and size + weight.nbytes > GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.nbytes
    if bucket:
        yield bucket
