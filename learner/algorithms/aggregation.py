"""From losses per token to one number: the weight of each token, with a denominator over the whole
mini-batch.

The weights of a mini-batch sum to 1. The loss is the weighted *sum* over tokens, so that micro-batches and
ranks may be cut in any way and their gradients simply add up.
"""

from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean"]


def token_weights(tokens: NDArray[np.integer], *, aggregation: Aggregation) -> NDArray[np.float64]:
    r"""Weight of one token of each trajectory.

    ``token_mean``: :math:`1 / \sum_j n_j`, every token counts the same (DAPO, arXiv:2503.14476, equation 12).
    ``sequence_mean``: :math:`1 / (S n_i)`, every trajectory counts the same (GRPO, arXiv:2402.03300,
    equation 3); S counts the trajectories with at least one token.

    Args:
        tokens: [S], tokens n_i that carry gradient in each trajectory.
        aggregation: which mean.

    Returns:
        [S]; 0 for trajectories without tokens.

    Example:
        >>> token_weights(np.array([3, 1]), aggregation="token_mean").tolist()
        [0.25, 0.25]
        >>> token_weights(np.array([4, 1, 0]), aggregation="sequence_mean").tolist()
        [0.125, 0.5, 0.0]
    """
    present = tokens > 0
    weights = np.zeros(len(tokens))
    match aggregation:
        case "token_mean":
            weights[present] = 1 / max(1, int(tokens.sum()))
        case "sequence_mean":
            weights[present] = 1 / (present.sum() * tokens[present])
        case _:
            assert_never(aggregation)
    return weights
