"""Reads tensors from the bytes of a safetensors file."""

from collections.abc import Iterable, Iterator

import torch

from actors.generator.weights.staging import TensorRow
from protocol.weights.format import TORCH_DTYPES

_TORCH = {name: getattr(torch, dtype) for name, dtype in TORCH_DTYPES.items()}


def tensors_in(data: torch.Tensor, rows: Iterable[TensorRow]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors. A tensor at a multiple of its item size shares ``data``; others are copies.

    Args:
        data: the file, as uint8.
        rows: rows of `actors.generator.weights.staging.tensor_table`.

    Example:
        >>> file = torch.tensor([7, 0, 0, 128, 63], dtype=torch.uint8)  # 1.0 from the second byte on
        >>> [(name, tensor.tolist()) for name, tensor in tensors_in(file, [["a", "F32", [1], 1, 4]])]
        [('a', [1.0])]
    """
    for name, dtype, shape, offset, nbytes in rows:
        item = _TORCH[dtype]
        part = data[offset : offset + nbytes]
        yield name, (part.clone() if offset % item.itemsize else part).view(item).view(shape)
