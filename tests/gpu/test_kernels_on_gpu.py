"""Fused kernels of the output layer and of the layers compute the formulas on a GPU."""

import pytest
import torch

from learner.update import target_logp as head_kernels
from learner.update.devices import fuse_layers
from learner.update.target_logp import target_logp
from tests.integration.learner.tiny_qwen3 import tiny_model
from tests.oracle.output_layer.kernel_checks import SHAPES, check_all, check_edges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_the_kernels_compute_the_formula():
    check_all("cuda", [*SHAPES, (33, 151_936)])
    check_edges("cuda")


@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_have_the_values_and_gradients_of_torch(monkeypatch, entropy):
    """Compare in float32, in chunks, through the whole output layer."""
    assert head_kernels._compiled(torch.device("cuda", 0))
    found = []
    for kernels in (True, False):
        monkeypatch.setattr(head_kernels, "usable", lambda device, kernels=kernels: kernels)
        for name in ("GPU_CHUNK_ELEMENTS", "PLAIN_GPU_CHUNK_ELEMENTS"):
            monkeypatch.setattr(f"learner.update.target_logp.{name}", 10 * 5003)
        generator = torch.Generator("cuda").manual_seed(0)
        hidden, weight = (
            torch.randn(n, 64, device="cuda", generator=generator, requires_grad=True) for n in (37, 5003)
        )
        target = torch.arange(37, device="cuda") * 100
        tau = torch.linspace(0.5, 2.0, 37, device="cuda")
        outputs = target_logp(
            hidden, lambda h, w=weight: h @ w.T, target, tau, vocabulary=5003, entropy_gradient=entropy
        )
        loss = (outputs[0] * tau).sum() + (outputs[1].sum() if entropy else 0.0)
        found.append([*outputs, *torch.autograd.grad(loss, (hidden, weight))])
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-3)


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
