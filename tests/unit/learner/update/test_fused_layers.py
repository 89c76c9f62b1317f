"""Fused layers change one model and nothing else, and they compute the same, or the model becomes what it was."""

import functools
from types import MethodType

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from learner.update.devices import fuse, fuse_layers, probe
from tests.integration.learner.tiny_qwen3 import tiny_model

ROTATE, NORM = modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3RMSNorm


class Library:
    """Changes a model as Liger does: names of its module, and the forward passes of its norms."""

    def __init__(self, factor=1.0):
        self.factor, self.rotated, self.settings = factor, 0, {}

    def apply(self, lm, **settings):
        self.settings = settings

        def rotate(*arguments):
            self.rotated += 1
            return tuple(self.factor * part for part in ROTATE(*arguments))

        def forward(norm, states):
            return NORM.forward(norm, states)

        modeling_qwen3.apply_rotary_pos_emb = rotate
        modeling_qwen3.Qwen3RMSNorm = type("Fused", (NORM,), {})
        modeling_qwen3.something_new = rotate
        lm.model.norm.forward = MethodType(forward, lm.model.norm)


def test_only_the_given_model_computes_with_the_kernels():
    lm, other, library = tiny_model(tied=True, seed=1), tiny_model(tied=True, seed=1), Library()
    assert fuse(lm, library.apply)
    assert modeling_qwen3.apply_rotary_pos_emb is ROTATE
    assert modeling_qwen3.Qwen3RMSNorm is NORM
    assert not hasattr(modeling_qwen3, "something_new")
    library.rotated = 0
    expected = probe(other)
    assert library.rotated == 0
    assert torch.equal(probe(lm), expected)
    assert library.rotated == lm.config.num_hidden_layers
    assert library.settings == {"cross_entropy": False, "fused_linear_cross_entropy": False, "swiglu": True}


def test_a_forward_pass_below_a_decorator_computes_with_the_kernels(monkeypatch):
    """transformers 5.24 has a decorator over the forward passes of attention, for the old name of an argument."""
    bare, passed = modeling_qwen3.Qwen3Attention.forward, []

    @functools.wraps(bare)
    def forward(*arguments, **named):
        passed.append(named.pop("old_name", None))
        return bare(*arguments, **named)

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", forward)
    lm, library = tiny_model(tied=True, seed=1), Library()
    assert fuse(lm, library.apply)
    library.rotated, passed[:] = 0, []
    probe(lm)
    assert library.rotated == len(passed) == lm.config.num_hidden_layers


def test_the_gradient_passes_through_the_kernels():
    gradients = []
    for fused in (False, True):
        lm = tiny_model(tied=True, seed=1)
        if fused:
            fuse(lm, Library().apply)
        lm.train()
        lm(input_ids=torch.arange(9)[None], use_cache=False).logits.square().sum().backward()
        gradients.append(lm.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*gradients)


def state(lm):
    """Return what each part of a model has, but for its tensors."""
    return [{name: id(value) for name, value in vars(part).items()} for part in lm.modules()]


def fails(*_, **__):
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_model_that_would_compute_something_else_becomes_what_it_was(factor, caplog):
    lm = tiny_model(tied=True, seed=1)
    before, expected = state(lm), probe(lm)
    assert not fuse(lm, Library(factor).apply)
    assert state(lm) == before
    assert torch.equal(probe(lm), expected)
    assert "layers are not fused, which is slower: logits would be" in caplog.text


def test_a_kernel_that_cannot_be_compiled_leaves_the_model_as_it_was(monkeypatch, caplog):
    """Triton compiles a kernel when the model first computes with it."""
    lm, library = tiny_model(tied=True, seed=1), Library()
    before, expected = state(lm), probe(lm)

    def apply(lm, **settings):
        library.apply(lm, **settings)
        lm.model.norm.forward = fails

    assert not fuse(lm, apply)
    assert state(lm) == before
    assert torch.equal(probe(lm), expected)
    assert "Failed to find C compiler" in caplog.text


def test_a_library_that_fails_half_way_leaves_the_model_as_it_was(caplog):
    lm = tiny_model(tied=True, seed=1)
    before = state(lm)

    def apply(lm, **settings):
        modeling_qwen3.apply_rotary_pos_emb = None
        lm.model.norm.forward = fails
        raise AttributeError("no attribute 'q_norm'")

    assert not fuse(lm, apply)
    assert state(lm) == before
    assert modeling_qwen3.apply_rotary_pos_emb is ROTATE
    assert "no attribute 'q_norm'" in caplog.text


def test_all_ranks_compute_alike():
    lm = tiny_model(tied=True, seed=1)
    before, asked = state(lm), []

    def another_cannot(mine):
        asked.append(mine)
        return False

    assert not fuse(lm, Library().apply, another_cannot)
    assert asked == [True]
    assert state(lm) == before


def test_a_cpu_has_no_fused_layers():
    assert not fuse_layers(tiny_model(tied=True, seed=1), torch.device("cpu"))
