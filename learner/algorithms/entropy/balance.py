"""Entropy-balanced policy optimisation, AEPO (arXiv:2510.14545): a clip that keeps gradient, and entropy in advantages.

This is the agentic AEPO. Arbitrary entropy policy optimisation, arXiv:2510.08141, is a different method.
"""

import torch
from torch import Tensor

from learner.algorithms.shapes import check_same_shape
from learner.algorithms.surrogates import SurrogateValue, dual_clipped_surrogate


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
