"""Chunks of tokens give the numbers and gradients of one plain log-softmax, in bounded memory."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.update import target_logp as file
from learner.update.target_logp import select, target_logp

N, V, D = 23, 61, 8


def problem(dtype=torch.float64, n=N, v=V, d=D):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(v, d, generator=generator, dtype=dtype).requires_grad_()
    target = torch.randint(0, v, (n,), generator=generator)
    return hidden, weight, target


def plain(hidden, weight, target, temperature):
    """Return the log-probabilities and entropies by the formula, from all logits at once, in float64."""
    z = (hidden @ weight.T).double() / temperature[:, None].double()
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    return log_p[torch.arange(len(target)), target], -(log_p.exp() * log_p).sum(-1)


def gradients(outputs, hidden, weight, *, entropy):
    """Return the gradients of an uneven sum over tokens."""
    share = torch.linspace(-1, 2, len(hidden))
    loss = (share * outputs[0]).sum() + ((share.flip(0) * outputs[1]).sum() if entropy else 0.0)
    return torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("rows", [1, 5, N, 1000])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_values_and_gradients_of_chunks_are_those_of_the_formula(
    monkeypatch, rows, entropy_gradient, temperature
):
    monkeypatch.setattr(file, "CHUNK_ELEMENTS", rows * V)
    hidden, weight, target = problem()
    tau = torch.ones(N) if temperature is None else torch.linspace(temperature, 2.0, N)
    ours = target_logp(
        hidden, lambda h: h @ weight.T, target, tau, vocabulary=V, entropy_gradient=entropy_gradient
    )
    expected = plain(hidden, weight, target, tau)
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.detach(), want.detach(), rtol=0, atol=3e-6)
    assert ours[1].requires_grad == entropy_gradient
    for got, want in zip(
        gradients(ours, hidden, weight, entropy=entropy_gradient),
        gradients(expected, hidden, weight, entropy=entropy_gradient),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_a_case_by_hand():
    """Logits log(1, 2, 5): p = 1/8, 2/8, 5/8; H = (1 log 8 + 2 log 4 + 5 log 8/5) / 8."""
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().requires_grad_()
    logp, entropy = select(logits, torch.tensor([1]), torch.ones(1), entropy_gradient=True)
    assert logp.item() == pytest.approx(np.log(2 / 8))
    assert entropy.item() == pytest.approx((np.log(8) + 2 * np.log(4) + 5 * np.log(8 / 5)) / 8)
    [gradient] = torch.autograd.grad(logp.sum(), logits)
    assert gradient.tolist()[0] == pytest.approx([-1 / 8, 1 - 2 / 8, -5 / 8])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_bfloat16_logits_are_summed_in_float32(temperature):
    logits = (
        (torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 3).bfloat16().requires_grad_()
    )
    target, tau = torch.arange(4), torch.full((4,), temperature)
    logp, entropy = select(logits, target, tau)
    rows = (logits.detach().double() / temperature).log_softmax(-1)
    np.testing.assert_allclose(logp.detach(), rows[torch.arange(4), target], atol=1e-5)
    np.testing.assert_allclose(entropy, -(rows.exp() * rows).sum(-1), atol=1e-5)
    [gradient] = torch.autograd.grad(logp.sum(), logits)
    assert gradient.dtype == torch.bfloat16


def test_the_gradient_may_be_asked_for_twice():
    hidden, weight, target = problem()
    logp, _ = select(hidden @ weight.T, target, torch.ones(N))
    first = torch.autograd.grad(logp.sum(), hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(logp.sum(), hidden)[0])


class Sizes(TorchDispatchMode):
    """Dispatch mode that records the number of elements of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_tensor_of_either_pass_is_larger_than_a_chunk(monkeypatch, entropy_gradient):
    n, v, d, rows = 400, 300, 4, 10
    hidden, weight, target = problem(torch.float32, n, v, d)

    def largest():
        with Sizes() as sizes:
            outputs = target_logp(
                hidden,
                lambda h: h @ weight.T,
                target,
                torch.full((n,), 0.9),
                vocabulary=v,
                entropy_gradient=entropy_gradient,
            )
            gradients(outputs, hidden, weight, entropy=entropy_gradient)
        return sizes.largest

    assert largest() == n * v  # one chunk
    monkeypatch.setattr(file, "CHUNK_ELEMENTS", rows * v)
    assert largest() <= rows * v


def test_what_waits_for_the_backward_pass_is_no_chunk(monkeypatch):
    """A chunked forward pass saves hidden states and weights for the backward pass, but no logits."""
    n, v, d, rows = 400, 300, 4, 10
    monkeypatch.setattr(file, "CHUNK_ELEMENTS", rows * v)
    hidden, weight, target = problem(torch.float32, n, v, d)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        target_logp(hidden, lambda h: h @ weight.T, target, torch.ones(n), vocabulary=v)
    assert max(saved, default=0) < rows * v
