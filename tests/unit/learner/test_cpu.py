"""Test training on a CPU: freed memory is kept, and attention over short bfloat16 sequences is in float32."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from learner.update.devices import SHORT, float_attention, use_float_attention
from tests.integration.learner.tiny_qwen3 import VOCAB, tiny_model

COUNT_FAULTS = """
import resource
import torch
from learner.update.devices import keep_freed_memory

assert keep_freed_memory()
for _ in range(3):  # the first times grow the heap
    layers = [torch.ones(2**20) for _ in range(4)]
    del layers
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    layers = [torch.ones(2**20) for _ in range(4)]
    del layers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ALL_PAGES = 20 * 4 * 1024


class Attention(torch.nn.Module):
    """The attributes that transformers' attention needs of its module."""

    num_key_value_groups = 1
    is_causal = True


def attended(length, dtype, function):
    torch.manual_seed(0)
    states = [torch.randn(2, 2, length, 32).to(dtype).requires_grad_() for _ in range(3)]
    out = function(*states)
    out.sum().backward()
    return out.detach().float(), [s.grad.float() for s in states]


def ours(query, key, value):
    return float_attention(Attention(), query, key, value, None)[0].transpose(1, 2)


def torchs(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is meant")
def test_memory_that_was_freed_is_used_again():
    """Tensors of 4 MiB, made and freed in turns, cost few page faults; the heap may still grow once."""
    counted = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    assert int(counted.stdout) < ALL_PAGES / 10


@pytest.mark.parametrize("length", [1, 5, SHORT - 1, SHORT, SHORT + 9])
def test_it_is_attention(length):
    exact, exact_gradients = attended(length, torch.float32, torchs)
    found, gradients = attended(length, torch.bfloat16, ours)
    torch.testing.assert_close(found, exact, atol=0.03, rtol=0.03)
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(("length", "same"), [(SHORT - 1, False), (SHORT, True)])
def test_long_sequences_are_left_to_torch(length, same):
    found, _ = attended(length, torch.bfloat16, ours)
    expected, _ = attended(length, torch.bfloat16, torchs)
    assert torch.equal(found, expected) is same


def test_short_ones_are_rounded_once():
    """Below the limit, the result is float32 attention on the bfloat16 states, rounded once."""
    torch.manual_seed(0)
    states = [torch.randn(2, 2, 40, 32).bfloat16() for _ in range(3)]
    assert torch.equal(ours(*states), torchs(*(s.float() for s in states)).bfloat16())


def test_a_mask_is_cast_with_the_states():
    states = [torch.randn(1, 2, 8, 32).bfloat16() for _ in range(3)]
    mask = torch.full((8, 8), float("-inf")).triu(1).bfloat16()[None, None]
    masked = float_attention(Attention(), *states, mask)[0].transpose(1, 2)
    torch.testing.assert_close(masked, ours(*states), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("dtype", "nearer"), [(torch.bfloat16, True), (torch.float32, False)])
def test_models_use_it_without_being_told_and_those_in_float32_see_no_change(dtype, nearer):
    exact = tiny_model(tied=True, seed=1)
    lm = copy.deepcopy(exact).to(dtype)
    tokens = torch.randint(0, VOCAB, (16, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, before = (model(input_ids=tokens).logits.float() for model in (exact, lm))
        use_float_attention()
        after = lm(input_ids=tokens).logits.float()
    assert lm.config._attn_implementation == "sdpa"
    assert torch.equal(after, before) is not nearer
    assert nearer is bool((after - expected).abs().mean() < (before - expected).abs().mean())


@pytest.fixture(autouse=True)
def plain_attention():
    """Restore transformers' own attention before and after each test."""
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)
