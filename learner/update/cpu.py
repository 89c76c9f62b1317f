"""What torch and the C library need to be told to train fast on a CPU."""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The most that glibc takes."""
SHORT = 192
"""Tokens below which torch's bfloat16 attention is slower than the float32 one, casts included: its backward pass
works on blocks that short sequences do not fill (four times slower at 43 tokens, as fast at 192)."""


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for the next tensors of that size; returns whether that can be had.

    glibc gives large blocks back to the system, which clears each page again when the next layer needs it: 5 to 15 %
    of a learner's step. Kept is about as much as was once in use at a time.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))


def use_float_attention() -> None:
    """Let bfloat16 models of transformers attend in float32 over short sequences where they compute on a CPU.

    It takes the place of "sdpa", torch's attention, in this process. Under a name of its own, models that ask by name
    what their attention can do would take it for another.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", float_attention)


def float_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention of transformers; in float32 for bfloat16 on a CPU below `SHORT` tokens.

    Args:
        query: [B, H, T, D]; keys and values likewise.

    Returns:
        [B, T, H, D] in the dtype of the query.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    short = query.shape[2] < SHORT and kwargs.get("position_bias") is None
    if short and dtype == torch.bfloat16 and query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    states, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return states.to(dtype), None
