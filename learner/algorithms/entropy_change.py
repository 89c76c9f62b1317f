"""What an update does to the policy's entropy, predicted from its tokens."""

from typing import NamedTuple

import torch
from torch import Tensor


class EntropyQuadrants(NamedTuple):
    """Parts of `entropy_change`, scalars, by probability (below the median or not) and sign of the advantage.

    Below the mean probability, positive advantages raise the entropy and negative ones lower it; above it,
    the other way round.
    """

    low_positive: Tensor
    high_positive: Tensor
    low_negative: Tensor
    high_negative: Tensor


def entropy_change(logp: Tensor, advantage: Tensor, active: Tensor) -> Tensor:
    r"""Change of the policy's entropy that an update drives, to first order, per unit of learning rate.

    .. math:: \Delta H / \eta \approx -\mathrm{Cov}_{y \sim \pi}(\log \pi(y), A(y) X(y))

    The entropy-clip rule of BAPO (arXiv:2510.18927), with X = 1 where the clip lets the gradient
    pass. It is exact, as the rate goes to 0, for a natural gradient step of a table of logits sampled on
    policy, z += η A X; a plain gradient step has π A X in place of A X. For a language model it is a
    direction, not a size. Adding one number to all A X changes nothing.

    Args:
        logp: log-probabilities [N] of the sampled tokens under the current policy, nats.
        advantage: [N].
        active: bool [N]: not clipped.

    Returns:
        A float64 scalar, nats per unit of learning rate; no gradient. 0 without tokens.

    Example:
        >>> p, a = torch.tensor([0.25, 0.5]).log(), torch.tensor([1.0, 0.0])
        >>> entropy_change(p, a, torch.tensor([True, True]))
        tensor(0.1733, dtype=torch.float64)
    """
    return _entropy_contributions(logp, advantage, active).sum()


def entropy_quadrants(logp: Tensor, advantage: Tensor, active: Tensor) -> EntropyQuadrants:
    """Which tokens drive `entropy_change`; the four parts add up to it.

    Tokens that are clipped or have advantage 0 contribute nothing. Arguments as of `entropy_change`; split at
    the median log-probability of all tokens given.

    Example:
        >>> p, a = torch.tensor([0.25, 0.25, 0.5, 0.5]).log(), torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> parts = entropy_quadrants(p, a, torch.ones(4, dtype=torch.bool))
        >>> [round(float(part), 4) for part in parts]
        [0.0866, -0.0866, -0.0866, 0.0866]
    """
    parts = _entropy_contributions(logp, advantage, active)
    ordered = logp.detach().sort().values
    n = len(ordered)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else torch.tensor(0.0)
    # strictly below: where most tokens are certain, the median is 0 and they are the likely ones
    low = logp.detach() < median
    return EntropyQuadrants(
        low_positive=parts[low & (advantage > 0)].sum(),
        high_positive=parts[~low & (advantage > 0)].sum(),
        low_negative=parts[low & (advantage < 0)].sum(),
        high_negative=parts[~low & (advantage < 0)].sum(),
    )


def _entropy_contributions(logp: Tensor, advantage: Tensor, active: Tensor) -> Tensor:
    """-(log p - mean log p) A X / N, float64 [N]: centring one factor is enough for the covariance."""
    log_probability = logp.detach().double()
    if not len(log_probability):
        return log_probability
    driven = torch.where(active, advantage.detach().double(), 0.0)
    return -(log_probability - log_probability.mean()) * driven / len(log_probability)
