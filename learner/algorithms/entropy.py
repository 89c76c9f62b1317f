"""Objectives and bounds by a token's entropy, and predictions of how an update changes it.

Clip bounds by entropy are HAPO's (arXiv:2509.16591), as half widths around 1. The clip that keeps gradient, and entropy
in advantages, are those of the agentic AEPO (arXiv:2510.14545); arbitrary entropy policy optimisation
(arXiv:2510.08141) is a different method.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from learner.algorithms.surrogates import SurrogateValue, dual_clipped_surrogate
from learner.algorithms.tokens import check_same_shape


def entropy_signal(entropy: Tensor, *, quantile: float = 0.8, epsilon: float = 1e-8) -> Tensor:
    r"""Measure how uncertain the policy was at each token, relative to the other tokens of the batch.

    .. math:: h_t = \log\max(H_t, \epsilon) - Q_\rho, \quad
              \tilde h_t = h_t / \max_s h_s \ (h_t > 0), \quad h_t / |\min_s h_s| \ (h_t \le 0)

    HAPO (arXiv:2509.16591). The published scale (root mean square of h) cancels and is left out. The
    released program divides negative h by the negative minimum, which turns certain tokens into uncertain
    ones. We follow the paper, where the signal keeps the sign of h.

    Args:
        entropy: [M] of *all* tokens of the batch that carry policy gradient, nats, >= 0.
        quantile: rho; tokens above that quantile of the entropy are the uncertain ones. It is taken at the
            nearest order statistic, as in the released program.
        epsilon: smaller entropies count as this one, nats; the released program's default.

    Returns:
        Signals [M] in [-1, 1], without gradient: 1 at the most uncertain token, -1 at the most certain one, 0
        where all are equal.

    Example:
        >>> entropy_signal(torch.tensor([0.05, 0.1, 0.2, 0.4, 1.6]))
        tensor([-1.0000, -0.6667, -0.3333,  0.0000,  1.0000])
    """
    if not entropy.numel():
        return entropy.detach()
    level = entropy.detach().clamp(min=epsilon).log()
    rank = round(quantile * (len(level) - 1)) + 1
    h = level - level.kthvalue(rank).values
    tiny = torch.finfo(h.dtype).tiny
    return torch.where(h > 0, h / h.max().clamp(min=tiny), h / (-h.min()).clamp(min=tiny))


def hapo_bounds(signal: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    r"""Compute the half widths of each token's clip range from its entropy signal.

    .. math:: \tilde h_t \le 0: (\epsilon_l (1 - \tilde h_t), \epsilon_h), \quad
              \tilde h_t > 0: (\epsilon_l, \epsilon_h (1 + \tilde h_t))

    HAPO (arXiv:2509.16591), asymmetric adaptive clipping: the ratio of a certain token may fall further, and
    the ratio of an uncertain token may rise further, up to twice as far.

    Args:
        signal: from `entropy_signal`, [N], in [-1, 1].
        low, high: half widths at signal 0.

    Returns:
        (low [N] in [low, 2 low], high [N] in [high, 2 high]). If low >= 0.5, the lower bound of the ratio may
        reach 0 and then clips nothing.

    Example:
        >>> hapo_bounds(torch.tensor([-1.0, 0.0, 0.5]), low=0.2, high=0.4)
        (tensor([0.4000, 0.2000, 0.2000]), tensor([0.4000, 0.4000, 0.6000]))
    """
    return low * (1 - signal.clamp(max=0)), high * (1 + signal.clamp(min=0))


def hapo_redistribute(advantage: Tensor, ratio: Tensor, signal: Tensor, *, low: float, high: float) -> Tensor:
    r"""Shift advantage from tokens that change little to tokens that matter.

    .. math:: A'_t = A_t (1 + \tilde h_t) \text{ if } (\tilde h_t > 0 \wedge r_t \notin N_t) \vee
              (\tilde h_t \le 0 \wedge r_t \in N_t), \text{ else } A_t; \quad
              N_t = [1 - \epsilon_{l,t}/2, 1 + \epsilon_{h,t}/2]

    HAPO (arXiv:2509.16591), differential advantage redistribution, with the half widths of `hapo_bounds`.
    Uncertain tokens count more once their ratio has left the interval :math:`N_t`. Certain tokens count less
    until theirs has left it.

    Args:
        advantage: [N].
        ratio: current / proximal [N]; no gradient flows to it.
        signal: from `entropy_signal`, [N].
        low, high: half widths at signal 0, as given to `hapo_bounds`.

    Returns:
        Advantages [N], between 0 and 2 · advantage.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> a, r = torch.ones(3), torch.tensor([1.0, 1.0, 1.5])
        >>> hapo_redistribute(a, r, torch.tensor([-0.5, 0.5, 0.5]), low=0.2, high=0.2)
        tensor([0.5000, 1.0000, 1.5000])
    """
    check_same_shape(advantage=advantage, ratio=ratio, signal=signal)
    left, right = hapo_bounds(signal, low=low, high=high)
    where = ratio.detach()
    near = (where >= 1 - left / 2) & (where <= 1 + right / 2)
    return torch.where((signal > 0) ^ near, advantage * (1 + signal), advantage)


def gradient_keeping_surrogate(
    ratio: Tensor, advantage: Tensor, *, low: float, high: float, ceiling: float | None = None
) -> SurrogateValue:
    r"""Compute PPO's objective with an upper bound that cuts the value and keeps the gradient.

    .. math:: (1 + \epsilon_\mathrm{high}) \frac{r_t}{\mathrm{sg}[r_t]} A_t \quad
              \text{where } A_t > 0 \text{ and } r_t > 1 + \epsilon_\mathrm{high}

    AEPO, arXiv:2510.14545. The value is that of PPO everywhere. Above the upper bound the gradient with respect to the
    log-probability is (1 + high) A instead of 0.

    Args:
        ratio: current / centre [N], > 0.
        advantage: [N], constant for the gradient.
        low, high: half widths of the clip range.
        ceiling: dual clip, largest ratio that counts where the advantage is negative; None: no dual clip.

    Returns:
        Objective [N], and where its gradient is zero. The upper bound never makes it zero.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> lp = torch.tensor([0.4055], requires_grad=True)
        >>> value, _ = gradient_keeping_surrogate(lp.exp(), torch.ones(1), low=0.2, high=0.2)
        >>> value.backward(); value.round(decimals=4).item(), lp.grad.round(decimals=4).item()
        (1.2000000476837158, 1.2000000476837158)
    """
    plain = dual_clipped_surrogate(ratio, advantage, low=low, high=high, ceiling=ceiling)
    above = (advantage > 0) & (ratio > 1 + high)
    kept = (1 + high) * ratio / ratio.detach() * advantage
    return SurrogateValue(torch.where(above, kept, plain.value), plain.clipped & ~above)


def entropy_multiplier(entropy: Tensor, *, coefficient: float) -> Tensor:
    r"""Compute factors of advantages that are larger for tokens of high entropy.

    .. math:: 1 + c \frac{H_t - \mathrm{mean} H}{\mathrm{std} H}

    AEPO, arXiv:2510.14545, with c = 0.2 and the sample deviation, as in a copy of the program. Mean and deviation are
    those of the tokens that are given. Equal entropies give 1.

    Args:
        entropy: [N], nats, without gradient.
        coefficient: c >= 0.

    Returns:
        Factors [N] with mean 1; negative where the entropy is more than 1 / c deviations below the mean.

    Example:
        >>> entropy_multiplier(torch.tensor([1.0, 2.0, 3.0]), coefficient=0.2)
        tensor([0.8000, 1.0000, 1.2000])
        >>> entropy_multiplier(torch.tensor([0.5, 0.5]), coefficient=0.2)
        tensor([1., 1.])
    """
    check_same_shape(entropy=entropy)
    if len(entropy) < 2 or float(deviation := entropy.std()) < 1e-9:
        return torch.ones_like(entropy)
    return 1 + coefficient * (entropy - entropy.mean()) / deviation


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
