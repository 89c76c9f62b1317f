"""Log-probabilities of chosen tokens, and entropies, from hidden states, without holding all logits at once.

The logits of T tokens over V words are by far the largest tensor of a language model's update: 8,192 x
152,000 in float32 are 5 GB, and a plain log-softmax with its gradient holds four tensors of this size. Here
logits exist only for a chunk of the tokens, once or twice. If there is more than one chunk, the backward pass
computes them again.

On a GPU, kernels read each logit once: log-probability of the target, entropy, and the gradient of both. Torch alone
needs some ten passes over the logits for this, with float32 copies. On a model with 152,000 words these passes took a
sixth of a learner step. The kernels are written in Triton, which comes with torch's CUDA build. It compiles them when
they are first called, for which the host needs a C compiler; without one, torch computes.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


CHUNK_ELEMENTS = 2**25
"""Targets x vocabulary held at once in float32: 128 MB, and twice that at the peak of either pass."""
GPU_CHUNK_ELEMENTS = 2**30
"""The same on a GPU with `learner.update.target_logp`, which make no float32 copy: 2 GB in bfloat16, and twice
that at the peak. In float32 it is half as many. Most micro-batches are a single chunk, computed once."""
PLAIN_GPU_CHUNK_ELEMENTS = 2**28
"""The same on a GPU without these kernels: 1 GB in float32, and twice that at the peak."""

Head = Callable[[Tensor], Tensor]


def target_logp(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    temperature: Tensor,
    *,
    vocabulary: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Compute the log-probability of each target, and the entropy of its distribution, in nats.

    .. math:: \log\pi(a) = z_a / \tau - \log \sum_v \exp(z_v / \tau), \quad
              H = -\sum_v \pi(v) \log\pi(v), \quad z = \mathrm{head}(h)

    Args:
        hidden: h, [N, D], hidden states at the targets only.
        head: function from hidden states [n, D] to logits [n, V]; called once or twice for each chunk.
        target: a, int64 [N].
        temperature: τ, float32 [N], > 0.
        vocabulary: V, which decides the size of chunks.
        entropy_gradient: whether gradient flows through the entropy.

    Returns:
        (log-probabilities, entropies), float32 [N] each. Gradient flows to ``hidden`` and to the parameters
        of ``head``.
    """

    def run(h: Tensor, a: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        return select(head(h), a, tau, entropy_gradient=entropy_gradient)

    rows = rows_at_once(vocabulary, hidden.device, hidden.dtype)
    if len(target) <= rows:
        return run(hidden, target, temperature)
    pieces = zip(*(torch.split(t, rows) for t in (hidden, target, temperature)), strict=True)
    # With gradient, the backward pass computes the logits again, a chunk at a time.
    if torch.is_grad_enabled():
        outputs = [checkpoint(run, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    else:
        outputs = [run(*piece) for piece in pieces]
    logps, entropies = zip(*outputs, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def rows_at_once(vocabulary: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return how many targets have their logits at a time.

    Example:
        >>> rows_at_once(2**15, torch.device("cpu"), torch.float32)
        1024
    """
    if device.type != "cuda":
        elements = CHUNK_ELEMENTS
    elif usable(device):
        elements = GPU_CHUNK_ELEMENTS * torch.bfloat16.itemsize // dtype.itemsize
    else:
        elements = PLAIN_GPU_CHUNK_ELEMENTS
    return max(1, elements // vocabulary)


def select(
    logits: Tensor, target: Tensor, temperature: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute what `target_logp` does from logits [N, V] of any floating-point type.

    On a CPU, and on a GPU without `learner.update.target_logp`, this holds two more tensors of the size of the
    logits, in float32.
    """
    function = _SelectByKernels if usable(logits.device) else _Select
    logp, entropy = function.apply(logits, target, temperature, entropy_gradient)  # type: ignore[no-untyped-call]
    return logp, entropy


class _SelectByKernels(torch.autograd.Function):
    """The same in two kernels. It saves the logits as they are."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, log_sum = forward(logits, target, temperature)
        ctx.entropy_gradient = entropy_gradient
        ctx.save_for_backward(logits, target, temperature, entropy, log_sum)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, see `learner.update.target_logp.backward`."""
        slope = grad_entropy if ctx.entropy_gradient else None
        logits, target, temperature, entropy, log_sum = ctx.saved_tensors
        gradient = backward(logits, target, temperature, entropy, log_sum, grad_logp, slope)
        return gradient, None, None, None


class _Select(torch.autograd.Function):
    """Autograd function that saves one tensor of the size of the logits.

    Its backward pass makes one more.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        # On a GPU the test would wait for the device, so the division is always done. On a CPU the test is
        # cheaper than the division.
        scaled = logits.is_cuda or bool((temperature != 1).any())
        log_probabilities = torch.log_softmax(
            logits / temperature[:, None] if scaled else logits, -1, dtype=torch.float32
        )
        logp = log_probabilities.gather(1, target[:, None])[:, 0]
        probabilities = log_probabilities.exp()
        # The backward pass needs one of the two tensors. The memory of the other is reused for their product.
        if entropy_gradient:
            saved, product = log_probabilities, probabilities.mul_(_finite(log_probabilities))
        else:
            saved, product = probabilities, _finite(log_probabilities).mul_(probabilities)
        entropy = -product.sum(-1)
        ctx.dtype, ctx.entropy_gradient, ctx.scaled = logits.dtype, entropy_gradient, scaled
        ctx.save_for_backward(saved, target, temperature, entropy)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        r"""Return the gradient ∂/∂z_v: (1[v = a] - π_v) / τ of log π(a), and -π_v (log π_v + H) / τ of H."""
        saved, target, temperature, entropy = ctx.saved_tensors
        if ctx.entropy_gradient:
            slope = (saved + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logp[:, None])
            gradient = slope.mul_(saved.exp()).neg_()
        else:
            gradient = saved * -grad_logp[:, None]
        gradient.scatter_add_(1, target[:, None], grad_logp[:, None])
        if ctx.scaled:
            gradient.div_(temperature[:, None])
        return gradient.to(ctx.dtype), None, None, None


def _finite(log_probabilities: Tensor) -> Tensor:
    """Return log-probabilities with a large number in place of -inf, in place.

    The product with the probability, 0, is then 0 and not undefined, so a word that cannot occur adds nothing to the
    entropy.
    """
    return log_probabilities.clamp_(min=-1e30)


def logits_after_head(lm: Any) -> Head | None:
    """Return the function that a causal language model applies to the output [n, V] of its last linear layer.

    Most models apply nothing; some scale or cap their logits. Return None if none of these forms gives the
    logits that the model's own forward gives on a few tokens. The model runs once.

    Where DeepSpeed has cut the model, this is a collective call.
    """
    config = lm.config.get_text_config()
    scale = float(
        getattr(config, "logit_scale", None)
        or getattr(config, "output_multiplier", None)
        or 1 / (getattr(config, "logits_scaling", None) or 1)
    )
    cap = float(getattr(config, "final_logit_softcapping", None) or 0)

    def altered(logits: Tensor) -> Tensor:
        logits = logits * scale if scale != 1 else logits
        return (logits / cap).tanh() * cap if cap else logits

    def plain(logits: Tensor) -> Tensor:
        return logits

    probe = torch.arange(4, device=next(lm.parameters()).device)[None] % config.vocab_size
    seen: list[Any] = []
    try:
        handle = lm.get_decoder().register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    except AttributeError:
        return None
    with torch.no_grad():
        lm.eval()
        try:
            logits = lm(input_ids=probe, use_cache=False).logits
        finally:
            handle.remove()
        try:
            direct = lm.get_output_embeddings()(seen[-1].last_hidden_state)
        except (AttributeError, TypeError, IndexError):
            return None
        # `altered` comes first, because small logits pass the test with and without a cap.
        for after in (altered, plain):
            if torch.allclose(after(direct).float(), logits.float(), atol=1e-4, rtol=1e-4):
                return after
    return None
