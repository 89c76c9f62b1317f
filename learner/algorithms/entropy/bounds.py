"""Clip bounds and advantages by a token's entropy, HAPO (arXiv:2509.16591).

``low`` and ``high`` are half widths around 1, as in `learner.algorithms.ppo.clipped_surrogate`.
"""

import torch
from torch import Tensor

from learner.algorithms.shapes import check_same_shape


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
