"""Check the kernels of the output layer against the formula, on a GPU or in Triton's interpreter on a CPU.

`python -m tests.oracle.output_layer.kernel_checks` checks them in the interpreter, if TRITON_INTERPRET is 1 at its
start.
"""

import itertools

import torch

from learner.update import target_logp

SHAPES = [(1, 2), (5, 7), (3, 4096), (2, 9001), (0, 5)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest error of a gradient of size 1, which is rounded to the type of the logits."""


def formula(logits, target, tau):
    """Return the log-probabilities and entropies, in float64."""
    log_p = torch.log_softmax(logits.double() / tau.double()[:, None], -1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def check(rows, words, dtype, device, *, entropy):
    """Compare both kernels with the formula and torch's gradient of it."""
    generator = torch.Generator().manual_seed(words)
    logits = (4 * torch.randn(rows, words, generator=generator)).to(dtype)
    target = torch.randint(0, words, (rows,), generator=generator)
    tau = 0.5 + torch.rand(rows, generator=generator)
    shares = [torch.randn(rows, generator=generator) for _ in range(2)]
    exact = logits.double().requires_grad_()
    expected = formula(exact, target, tau)
    loss = (shares[0] * expected[0]).sum() + ((shares[1] * expected[1]).sum() if entropy else 0.0)
    (gradient,) = torch.autograd.grad(loss, exact)

    def moved(tensor):
        return tensor.to(device)

    logp, found_entropy, log_sum = target_logp.forward(*map(moved, (logits, target, tau)))
    found = target_logp.backward(
        *map(moved, (logits, target, tau, found_entropy, log_sum, shares[0])),
        moved(shares[1]) if entropy else None,
    )
    assert logp.dtype == found_entropy.dtype == torch.float32
    assert found.dtype == dtype
    for got, want in ((logp, expected[0]), (found_entropy, expected[1])):
        torch.testing.assert_close(got.cpu().double(), want.detach(), rtol=1e-5, atol=2e-5)
    # Rounding is relative. The least that counts is a share of what the words other than the target have.
    least = gradient.abs().median(-1, keepdim=True).values
    error = (found.cpu().double() - gradient).abs()
    assert (error <= TOLERANCE[dtype] * (gradient.abs() + least) + 1e-6).all()


def check_all(device, shapes=SHAPES):
    """Check shapes with rests of a block, types, and both kinds of gradients."""
    for (rows, words), dtype, entropy in itertools.product(shapes, TOLERANCE, (False, True)):
        check(rows, words, dtype, device, entropy=entropy)


def check_edges(device):
    """Words without probability cost no token its numbers, and a target that is no word has none."""
    logits = torch.zeros(2, 9000, device=device)
    logits[:, :5000] = -torch.inf
    ones = torch.ones(2, device=device)
    logp, entropy, _ = target_logp.forward(logits, torch.tensor([6000, 9000], device=device), ones)
    expected = torch.log(torch.tensor(4000.0))
    torch.testing.assert_close(entropy.cpu(), expected.expand(2))
    torch.testing.assert_close(logp[0].cpu(), -expected)
    assert logp[1].isnan()
    # Every other of these targets: they do not lie one behind the other.
    target = torch.arange(4, device=device)[::2]
    spread = torch.arange(6.0, device=device).reshape(2, 3)
    logp, _, _ = target_logp.forward(spread, target, ones)
    torch.testing.assert_close(logp, torch.log_softmax(spread, -1).gather(1, target[:, None])[:, 0])


if __name__ == "__main__":
    check_all("cpu")
    check_edges("cpu")
    print("the kernels agree with the formula")
