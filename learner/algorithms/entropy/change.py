"""Prediction of what an update does to the policy's entropy, from its tokens, and tokens to leave out by it."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from learner.algorithms.shapes import check_same_shape


class EntropyQuadrants(NamedTuple):
    """Parts of `entropy_change`, scalars, by probability (below the median or not) and sign of the advantage.

    Below the mean log-probability, positive advantages raise the entropy and negative ones lower it. Above
    it, positive advantages lower the entropy and negative ones raise it.
    """

    low_positive: Tensor
    high_positive: Tensor
    low_negative: Tensor
    high_negative: Tensor


def entropy_change(logp: Tensor, advantage: Tensor, active: Tensor) -> Tensor:
    r"""Predict to first order how an update changes the policy's entropy, per unit of learning rate.

    .. math:: \Delta H / \eta \approx -\mathrm{Cov}_{y \sim \pi}(\log \pi(y), A(y) X(y))

    This is the entropy-clip rule of BAPO (arXiv:2510.18927), with X = 1 where the clip lets the gradient
    pass. In the limit of a small learning rate it is exact for a natural gradient step z += η A X on a table
    of logits, with tokens sampled on policy; a plain gradient step has π A X in place of A X. For a language
    model it gives a direction, not a size. Adding one number to all A X changes nothing.

    Args:
        logp: log-probabilities [N] of the sampled tokens under the current policy, nats.
        advantage: [N].
        active: bool [N]: True where the token is not clipped.

    Returns:
        A float64 scalar without gradient, nats per unit of learning rate; 0 if there are no tokens.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> p, a = torch.tensor([0.25, 0.5]).log(), torch.tensor([1.0, 0.0])
        >>> entropy_change(p, a, torch.tensor([True, True]))
        tensor(0.1733, dtype=torch.float64)
    """
    check_same_shape(logp=logp, advantage=advantage, active=active)
    return _entropy_contributions(logp, advantage, active).sum()


def entropy_quadrants(logp: Tensor, advantage: Tensor, active: Tensor) -> EntropyQuadrants:
    """Split `entropy_change` by the tokens that drive it; the four parts add up to it.

    Tokens that are clipped or have advantage 0 contribute nothing. The arguments are those of
    `entropy_change`. Low and high probabilities are split at the median log-probability of all given tokens.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> p, a = torch.tensor([0.25, 0.25, 0.5, 0.5]).log(), torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> parts = entropy_quadrants(p, a, torch.ones(4, dtype=torch.bool))
        >>> [round(float(part), 4) for part in parts]
        [0.0866, -0.0866, -0.0866, 0.0866]
    """
    check_same_shape(logp=logp, advantage=advantage, active=active)
    parts = _entropy_contributions(logp, advantage, active)
    ordered = logp.detach().sort().values
    n = len(ordered)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else torch.tensor(0.0)
    # Strictly below: where most tokens are certain the median is 0, and these tokens must count as likely.
    low = logp.detach() < median
    return EntropyQuadrants(
        low_positive=parts[low & (advantage > 0)].sum(),
        high_positive=parts[~low & (advantage > 0)].sum(),
        low_negative=parts[low & (advantage < 0)].sum(),
        high_negative=parts[~low & (advantage < 0)].sum(),
    )


def _entropy_contributions(logp: Tensor, advantage: Tensor, active: Tensor) -> Tensor:
    """Return -(log p - mean log p) A X / N, float64 [N]. Centring one factor is enough for the covariance."""
    log_probability = logp.detach().double()
    if not len(log_probability):
        return log_probability
    driven = torch.where(active, advantage.detach().double(), 0.0)
    return -(log_probability - log_probability.mean()) * driven / len(log_probability)


def covariance_mask(
    advantage: ArrayLike, logp: ArrayLike, *, low: float, high: float, share: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    r"""Choose the tokens that keep their gradient.

    .. math:: c_j = (A_j - \mathrm{mean} A) \, (\log \pi(a_j) - \mathrm{mean} \log \pi)

    Of the tokens with low < c < high, a share of all tokens is drawn, and left out. Such tokens lower the entropy most
    (SPEAR, arXiv:2509.22601, which leaves out 0.02 of all with 1 < c < 40).

    Args:
        advantage: [N].
        logp: log-probabilities [N], nats.
        low, high: bounds of the covariance, exclusive.
        share: share of all tokens that is left out at most, 0 to 1.
        rng: generator for the draw.

    Returns:
        False where a token is left out, [N].

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> covariance_mask([4, 0, 0, 0], [-1, -3, -3, -3], low=1, high=40, share=0.25, rng=rng).tolist()
        [False, True, True, True]
    """
    advantages, logps = np.asarray(advantage, dtype=np.float64), np.asarray(logp, dtype=np.float64)
    check_same_shape(advantage=advantages, logp=logps)
    kept = np.ones(len(advantages), dtype=np.bool_)
    if len(kept):
        covariance = (advantages - advantages.mean()) * (logps - logps.mean())
        places = np.flatnonzero((covariance > low) & (covariance < high))
        count = min(len(places), int(share * len(kept)))
        kept[rng.choice(places, count, replace=False)] = False
    return kept
