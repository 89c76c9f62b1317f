"""Importance ratios between policies, formed in log space."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are held within ±20 (4.9e8): beyond it a float32 product of ratio and advantage may overflow."""


def importance_ratio(logp_numerator: Tensor, logp_denominator: Tensor) -> Tensor:
    r"""How much likelier a sampled token is under one policy than under another.

    .. math:: r_t = \exp(\mathrm{clamp}(\log \pi_a(a_t|s_t) - \log \pi_b(a_t|s_t), \pm 20))

    Args:
        logp_numerator: log-probabilities [N], nats, of the tokens under policy a.
        logp_denominator: the same under policy b.

    Returns:
        Ratios [N] in [2e-9, 5e8]. Gradient flows to both arguments, and is zero where the clamp acts.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> importance_ratio(torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log())
        tensor([2.0000, 0.5000])
    """
    if logp_numerator.shape != logp_denominator.shape:
        raise ValueError(
            f"log-probabilities must have one shape, got {tuple(logp_numerator.shape)} "
            f"and {tuple(logp_denominator.shape)}"
        )
    return (logp_numerator - logp_denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def truncated_weight(logp_proximal: Tensor, logp_behaviour: Tensor, *, ceiling: float) -> Tensor:
    r"""Weight that corrects a stale token towards the proximal policy.

    .. math:: w_t = \min(c, \pi_\mathrm{prox}(a_t|s_t) / \mu(a_t|s_t))

    The truncation of :math:`\bar\rho_t` in IMPALA (arXiv:1802.01561, section 4.1), used for language models
    as truncated importance sampling. It trades variance for bias: the larger the lag, the more tokens sit
    at the ceiling. With equal policies and c >= 1 it is 1.

    Args:
        logp_proximal: log-probabilities [N], nats, under the proximal policy.
        logp_behaviour: the same under the behaviour policy that sampled the tokens.
        ceiling: c > 0.

    Returns:
        Weights [N] in (0, ceiling], without gradient.

    Example:
        >>> truncated_weight(torch.tensor([0.25, 0.4]).log(), torch.tensor([0.5, 0.1]).log(), ceiling=2.0)
        tensor([0.5000, 2.0000])
    """
    if ceiling <= 0:
        raise ValueError(f"ceiling must be > 0, got {ceiling}")
    return importance_ratio(logp_proximal, logp_behaviour).clamp(max=ceiling).detach()


def effective_sample_size(weights: Tensor) -> Tensor:
    r"""Share of the tokens that count, under importance weights (Kish; Owen, Monte Carlo, section 9.3).

    .. math:: \mathrm{ESS} / N = (\sum_t w_t)^2 / (N \sum_t w_t^2)

    Args:
        weights: [N], non-negative, N >= 1.

    Returns:
        A scalar in [1/N, 1]: 1 when all weights are equal. It does not change when all weights are scaled.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.5000)
    """
    weights = weights.double()
    return (weights.sum().square() / (len(weights) * weights.square().sum())).float()


def at_ceiling(logp_proximal: Tensor, logp_behaviour: Tensor, *, ceiling: float) -> Tensor:
    """Where `truncated_weight` sits at its ceiling. Bool [N].

    Example:
        >>> at_ceiling(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0]), ceiling=2.0)
        tensor([False,  True])
    """
    return importance_ratio(logp_proximal, logp_behaviour) > torch.tensor(ceiling)
