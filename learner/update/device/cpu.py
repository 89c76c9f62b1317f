"""Settings that let torch and the C library train fast on a CPU."""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

# Numbers of the mallopt parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Largest threshold that glibc accepts."""
SHORT = 192
"""Number of tokens below which torch's bfloat16 attention is slower than its float32 attention, casts
included. The backward pass in bfloat16 works on blocks that short sequences do not fill (four times slower at
43 tokens, equally fast at 192)."""


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees, and return whether that worked.

    By default glibc returns large blocks to the system, which clears each page again when the next layer
    needs it: 5 to 15 % of a learner's step. With this call the process keeps them for the next tensors of
    that size. It keeps about as much memory as was once in use at a time.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Other C libraries than glibc may lack mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))


def use_float_attention() -> None:
    """Let bfloat16 models of transformers attend in float32 over short sequences on a CPU.

    `float_attention` replaces "sdpa", torch's attention, in this process. It must keep that name: models look
    up the abilities of their attention by name, and would not recognise a new one.
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
    """Compute the scaled dot-product attention of transformers.

    On a CPU, bfloat16 sequences of fewer than `SHORT` tokens are computed in float32.

    Args:
        query: [B, H, T, D]; ``key`` and ``value`` have this layout, too.

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
