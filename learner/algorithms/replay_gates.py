"""Gates of replay: how much replayed items count yet, and whether a group needs one of them."""

import math

import numpy as np
from numpy.typing import ArrayLike


def self_imitation_weight(step: int, *, warmup_steps: int, ceiling: float = 1.0) -> float:
    r"""Return the weight of replayed items, which grows while the policy learns what is worth imitating.

    .. math:: \gamma(t) = c\,\frac{1 - \cos(\pi t / T_w)}{2} \quad (t \le T_w), \qquad c \text{ after}

    SPEAR (arXiv:2509.22601): c = 1, T_w = 200.

    Args:
        step: t >= 0, learner steps.
        warmup_steps: T_w >= 0; 0 means no warm-up.
        ceiling: c, the weight after the warm-up.

    Returns:
        A weight in [0, c].

    Example:
        >>> [round(self_imitation_weight(t, warmup_steps=200), 4) for t in (0, 50, 100, 150, 200, 500)]
        [0.0, 0.1464, 0.5, 0.8536, 1.0, 1.0]
    """
    if step >= warmup_steps:
        return ceiling
    return ceiling * (1 - math.cos(math.pi * step / warmup_steps)) / 2


def group_failed(returns: ArrayLike, *, max_std: float = 0.05, max_mean: float = 0.2) -> bool:
    r"""Return whether a group failed completely, so that it has no signal unless a stored success joins it.

    .. math:: \mathrm{std}(R) < 0.05 \wedge \mathrm{mean}(R) < 0.2

    ARPO (arXiv:2505.16282, released code). The standard deviation has divisor G.

    Args:
        returns: [G], at least one.
        max_std: exclusive upper bound of the standard deviation.
        max_mean: exclusive upper bound of the mean.

    Raises:
        ValueError: the group is empty.

    Example:
        >>> group_failed([0.0, 0.0, 0.0]), group_failed([0.0, 0.0, 1.0]), group_failed([1.0, 1.0, 1.0])
        (True, False, False)
    """
    values = np.asarray(returns, dtype=np.float64)
    if not values.size:
        raise ValueError("a group without members has neither failed nor succeeded")
    return bool(values.std() < max_std and values.mean() < max_mean)
