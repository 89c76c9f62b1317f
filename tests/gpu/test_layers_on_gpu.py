"""A model with Liger's kernels has the log-probabilities and gradients of transformers."""

import pytest
import torch

from learner.update.devices import fuse_layers
from tests.integration.learner.tiny_qwen3 import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest norm of a difference, relative to the norm."""


def outputs(dtype, *, fused):
    """Return log-probabilities and gradients of one row of a tiny model on the GPU."""
    lm = tiny_model(tied=True, seed=1).to("cuda", dtype)
    assert not fused or fuse_layers(lm, torch.device("cuda", 0))
    ids = (torch.arange(120, device="cuda") * 7 % lm.config.vocab_size)[None]
    logp = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits.float(), -1)
    picked = logp[0, :-1].gather(-1, ids[0, 1:, None])
    (picked[:, 0] * torch.linspace(-1, 2, 119, device="cuda")).sum().backward()
    return {"logp": picked.detach()} | {name: p.grad.float() for name, p in lm.named_parameters()}


@pytest.mark.parametrize("dtype", list(ERROR))
def test_values_and_gradients_are_those_of_transformers(dtype):
    pytest.importorskip("liger_kernel")
    plain, fused = outputs(dtype, fused=False), outputs(dtype, fused=True)
    for name, expected in plain.items():
        error = (fused[name] - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error < ERROR[dtype], f"{name} is {float(error):.2%} off"
