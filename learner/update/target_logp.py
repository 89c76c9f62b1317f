"""Log-probabilities of chosen tokens, and entropies, from hidden states, without holding all logits at once.

The logits of T tokens over V words are by far the largest tensor of a language model's update: 8,192 x
152,000 in float32 are 5 GB, and a plain log-softmax with its gradient holds four tensors of this size. Here
logits exist only for a chunk of the tokens, once or twice. If there is more than one chunk, the backward pass
computes them again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.update import head_kernels

CHUNK_ELEMENTS = 2**25
"""Targets x vocabulary held at once in float32: 128 MB, and twice that at the peak of either pass."""
GPU_CHUNK_ELEMENTS = 2**30
"""The same on a GPU with `learner.update.head_kernels`, which make no float32 copy: 2 GB in bfloat16, and twice
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
    elif head_kernels.usable(device):
        elements = GPU_CHUNK_ELEMENTS * torch.bfloat16.itemsize // dtype.itemsize
    else:
        elements = PLAIN_GPU_CHUNK_ELEMENTS
    return max(1, elements // vocabulary)


def select(
    logits: Tensor, target: Tensor, temperature: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute what `target_logp` does from logits [N, V] of any floating-point type.

    On a CPU, and on a GPU without `learner.update.head_kernels`, this holds two more tensors of the size of the
    logits, in float32.
    """
    function = _SelectByKernels if head_kernels.usable(logits.device) else _Select
    logp, entropy = function.apply(logits, target, temperature, entropy_gradient)  # type: ignore[no-untyped-call]
    return logp, entropy


class _SelectByKernels(torch.autograd.Function):
    """The same in two kernels. It saves the logits as they are."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, log_sum = head_kernels.forward(logits, target, temperature)
        ctx.entropy_gradient = entropy_gradient
        ctx.save_for_backward(logits, target, temperature, entropy, log_sum)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, see `learner.update.head_kernels.backward`."""
        slope = grad_entropy if ctx.entropy_gradient else None
        logits, target, temperature, entropy, log_sum = ctx.saved_tensors
        gradient = head_kernels.backward(logits, target, temperature, entropy, log_sum, grad_logp, slope)
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
            saved, product = log_probabilities, probabilities.mul_(log_probabilities)
        else:
            saved, product = probabilities, log_probabilities.mul_(probabilities)
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
