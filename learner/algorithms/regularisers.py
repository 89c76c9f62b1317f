"""Regularisers and what they are measured by: entropy, and estimates of the KL divergence from sampled
tokens.

Estimators k1, k2, k3 of KL(a || b) from tokens sampled by a (J. Schulman, "Approximating KL divergence",
2020), with d = log b(x) - log a(x). All are per token, in nats.
"""

from torch import Tensor

from learner.algorithms.ratios import LOG_RATIO_LIMIT


def kl_k1(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """-d: unbiased, high variance, may be negative. Shape [N].

    Example:
        >>> import torch
        >>> kl_k1(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.6931])
    """
    return logp_a - logp_b


def kl_k2(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """d²/2: biased, low variance, never negative. Shape [N].

    Example:
        >>> import torch
        >>> kl_k2(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.2402])
    """
    return (logp_a - logp_b).square() / 2


def kl_k3(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased, never negative; the one of GRPO (arXiv:2402.03300, equation 4). Shape [N].

    d is held within ±20 nats. Gradient flows to both arguments, and is zero where they are equal.

    Example:
        >>> import torch
        >>> kl_k3(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log())
        tensor([0.1931, 0.0000])
    """
    d = (logp_b - logp_a).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.expm1() - d


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy of whole distributions, -Σ p log p, in nats, in [0, log V].

    Args:
        log_probabilities: normalised, [N, V].

    Returns:
        [N]; gradient flows.

    Example:
        >>> import torch
        >>> entropy(torch.tensor([[0.5, 0.5]]).log())
        tensor([0.6931])
    """
    return -(log_probabilities.exp() * log_probabilities).sum(-1)
