"""Token weights that turn losses per token into one number, with a denominator over the whole mini-batch.

For the two means, the weights of the tokens of a mini-batch sum to 1. For ``fixed`` they sum to the mean
length over a constant. In each case the loss is the weighted *sum* over tokens, so micro-batches and ranks
may be cut in any way, and their gradients add up.
"""

from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean", "fixed"]


def token_weights(
    tokens: NDArray[np.integer], *, aggregation: Aggregation, fixed_tokens: int = 0
) -> NDArray[np.float64]:
    r"""Compute the weight of one token of each trajectory.

    ``token_mean``: :math:`1 / \sum_j n_j`, every token counts the same (DAPO, arXiv:2503.14476, equation 12).
    ``sequence_mean``: :math:`1 / (S n_i)`, every trajectory counts the same (GRPO, arXiv:2402.03300, equation
    3). ``fixed``: :math:`1 / (S L)`, the tokens of every trajectory are summed and divided by one constant L.
    A token then counts the same in long and short trajectories, and in all mini-batches of S trajectories
    (Dr. GRPO, arXiv:2503.20783, whose program sets L to the largest allowed response length). S in these
    formulas counts only the trajectories with at least one token.

    Args:
        tokens: number n_i of tokens that carry gradient in each trajectory, one entry per trajectory.
        aggregation: which of the three weightings.
        fixed_tokens: L >= 1 for ``fixed``; ignored by the others.

    Returns:
        Weights, one per trajectory; 0 for trajectories without tokens.

    Raises:
        ValueError: ``fixed`` without ``fixed_tokens``.

    Example:
        >>> token_weights(np.array([3, 1]), aggregation="token_mean").tolist()
        [0.25, 0.25]
        >>> token_weights(np.array([4, 1, 0]), aggregation="sequence_mean").tolist()
        [0.125, 0.5, 0.0]
        >>> token_weights(np.array([4, 1, 0]), aggregation="fixed", fixed_tokens=8).tolist()
        [0.0625, 0.0625, 0.0]
    """
    present = tokens > 0
    weights = np.zeros(len(tokens))
    match aggregation:
        case "token_mean":
            weights[present] = 1 / max(1, int(tokens.sum()))
        case "sequence_mean":
            weights[present] = 1 / (present.sum() * tokens[present])
        case "fixed":
            if fixed_tokens < 1:
                raise ValueError(f'aggregation "fixed" needs fixed_tokens >= 1, got {fixed_tokens}')
            weights[present] = 1 / (max(1, int(present.sum())) * fixed_tokens)
        case _:
            assert_never(aggregation)
    return weights
