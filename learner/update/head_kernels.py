"""Kernels for a GPU that read each logit once: log-probability of the target, entropy, and the gradient of both.

Torch alone needs some ten passes over the logits for this, with float32 copies. On a model with 152,000 words these
passes took a sixth of a learner step. The kernels are written in Triton, which comes with torch's CUDA build. It
compiles them when they are first called, for which the host needs a C compiler; without one, torch computes.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BLOCK = 4096
"""Logits of a row that a program reads at once."""
WARPS = 8


def usable(device: torch.device) -> bool:
    """Return whether the kernels compute on this device: it is a GPU for which they could be compiled."""
    return device.type == "cuda" and _compiled(device)


def forward(logits: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute what `learner.update.target_logp.select` does, and the logarithm of the sum.

    .. math:: \log Z = \log \sum_v \exp(z_v / \tau), \quad \log\pi(a) = z_a / \tau - \log Z, \quad
              H = \log Z - \sum_v \pi(v) z_v / \tau

    Args:
        logits: z, [N, V] of any floating-point type.
        target: a, int64 [N].
        temperature: τ, float32 [N], > 0.

    Returns:
        log π(a), H and log Z, float32 [N] each.
    """
    logits, target, temperature = logits.contiguous(), target.contiguous(), temperature.contiguous()
    rows, words = logits.shape
    logp, entropy, log_sum = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _forward_kernel()[(rows,)](
            logits, target, temperature, logp, entropy, log_sum, words, BLOCK=BLOCK, num_warps=WARPS
        )
    return logp, entropy, log_sum


def backward(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor,
    entropy: Tensor,
    log_sum: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    r"""Return the gradient of the logits, in their type.

    .. math:: \frac{g_a (1[v = a] - \pi_v) - g_H \pi_v (\log\pi_v + H)}{\tau}

    Args:
        entropy: H, as `forward` returned it.
        log_sum: log Z, likewise.
        grad_logp: g_a, float32 [N].
        grad_entropy: g_H, float32 [N]; None: nothing flows through the entropy.
    """
    logits, target, temperature = logits.contiguous(), target.contiguous(), temperature.contiguous()
    rows, words = logits.shape
    gradient = torch.empty_like(logits)
    if rows:
        grid = (rows, -(-words // BLOCK))
        _backward_kernel()[grid](
            logits, target, temperature, entropy, log_sum, grad_logp.contiguous(),
            grad_logp if grad_entropy is None else grad_entropy.contiguous(), gradient, words,
            HAS_ENTROPY=grad_entropy is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return gradient


@cache
def _compiled(device: torch.device) -> bool:
    """Return whether the kernels run on this GPU; if not, the log says why, once."""
    try:
        logits = torch.zeros(1, 2, device=device)
        target, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
        _, entropy, log_sum = forward(logits, target, one)
        backward(logits, target, one, entropy, log_sum, one, one)
        torch.cuda.synchronize(device)
    except Exception as error:
        log.warning(
            "Triton cannot compile the kernels of the output layer, so torch computes them, which is slower: %s",
            " ".join(str(error).split())[:300],
        )
        return False
    return True


@cache
def _forward_kernel() -> Any:
    """Define a kernel. Triton is imported here, because a CPU does not need it."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(logits, target, temperature, logp, entropy, log_sum, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        tau = tl.load(temperature + row)
        start = logits + row * words
        # Largest logit so far, the sum of exponentials relative to it, and the sum of those times their logit.
        largest = tl.full((), -float("inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        weighted = tl.full((), 0.0, tl.float32)
        for first in range(0, words, BLOCK):
            place = first + tl.arange(0, BLOCK)
            z = tl.load(start + place, mask=place < words, other=-float("inf")).to(tl.float32) / tau
            higher = tl.maximum(largest, tl.max(z, 0))
            # If all words so far have no probability, their weights shall be 0 and not undefined.
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            weight = tl.exp(z - shift)
            shrink = tl.exp(largest - shift)
            total = total * shrink + tl.sum(weight, 0)
            weighted = weighted * shrink + tl.sum(tl.where(weight > 0, weight * z, 0.0), 0)
            largest = higher
        found = largest + tl.log(total)
        word = tl.load(target + row)
        # A target that is no word has no probability, rather than that of a neighbour in memory.
        inside = (word >= 0) & (word < words)
        chosen = tl.load(start + word, mask=inside, other=float("nan")).to(tl.float32) / tau
        tl.store(logp + row, chosen - found)
        tl.store(entropy + row, found - weighted / total)
        tl.store(log_sum + row, found)

    return kernel


@cache
def _backward_kernel() -> Any:
    """Define the other kernel."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        logits, target, temperature, entropy, log_sum, grad_logp, grad_entropy, gradient, words,
        HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < words
        tau = tl.load(temperature + row)
        start = row * words
        z = tl.load(logits + start + place, mask=inside, other=-float("inf")).to(tl.float32) / tau
        log_probability = z - tl.load(log_sum + row)
        probability = tl.exp(log_probability)
        hit = place == tl.load(target + row)
        found = tl.load(grad_logp + row) * (tl.where(hit, 1.0, 0.0) - probability)
        if HAS_ENTROPY:
            slope = log_probability + tl.load(entropy + row)
            found -= tl.load(grad_entropy + row) * tl.where(probability > 0, probability * slope, 0.0)
        tl.store(gradient + start + place, (found / tau).to(gradient.dtype.element_ty), mask=inside)

    return kernel
