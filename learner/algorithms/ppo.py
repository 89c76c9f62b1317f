"""PPO's clipped objective, and where its clip cuts off the gradient.

Advantages are constants for the gradient. Further clips are in `learner.algorithms.surrogates`.
"""

import torch
from torch import Tensor

from learner.algorithms.shapes import check_same_shape


def clipped_surrogate(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    r"""Compute PPO's pessimistic objective.

    .. math:: \min(r_t A_t, \mathrm{clip}(r_t, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high}) A_t)

    arXiv:1707.06347, equation 7; with different bounds it is "clip-higher" of DAPO (arXiv:2503.14476,
    section 3.1).

    Args:
        ratio: current / proximal [N], > 0.
        advantage: [N], constant for the gradient.
        low, high: half widths of the clip range, dimensionless; 0 <= low < 1, high >= 0.

    Returns:
        Objective [N], to be maximised. Gradient flows through ``ratio``, except where `clip_active`. At
        ratio 1 its gradient with respect to the log-probability is the advantage.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
        >>> clipped_surrogate(r, a, low=0.2, high=0.28)
        tensor([ 1.2800, -1.5000, -0.8000])
    """
    check_same_shape(ratio=ratio, advantage=advantage)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clip_active(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """Return where the clip cuts off the gradient of `clipped_surrogate`, bool [N].

    The mean of the result is the clip fraction. The arguments are those of `clipped_surrogate`.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> r, a = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
        >>> clip_active(r, a, low=0.2, high=0.28)
        tensor([ True, False,  True])
    """
    check_same_shape(ratio=ratio, advantage=advantage)
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
