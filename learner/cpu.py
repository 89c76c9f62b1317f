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
ATTENTION = "offbeat_sdpa"


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for the next tensors of that size; returns whether that can be had.

    glibc gives large blocks back to the system, which clears each page again when the next layer needs it: 5 to 15 %
    of a learner's step. Kept is no more than was once in use at a time.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))


def use_float_attention(lm: Any) -> None:
    """Let a bfloat16 model on a CPU attend in float32 over short sequences: faster there, and more exact.

    Args:
        lm: a model of transformers; one that does not use torch's attention stays as it is.
    """
    if torch.cuda.is_available() or lm.dtype != torch.bfloat16 or lm.config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, float_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    lm.set_attn_implementation(ATTENTION)


def float_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention of transformers; below `SHORT` tokens in float32.

    Args:
        query: [B, H, T, D]; keys and values likewise.

    Returns:
        [B, T, H, D] in the dtype of the query.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    if query.shape[2] < SHORT:
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    states, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return states.to(dtype), None
