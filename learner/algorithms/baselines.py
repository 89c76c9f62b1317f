"""What is taken off the advantages of a rollout group, once the learner's weights have scored its answers.

Advantages that compare returns are formed before anything is scored. These two need log-probabilities of whole answers,
and they shift all members of a group alike or by their own score.
"""

import numpy as np
from numpy.typing import ArrayLike

from learner.algorithms.advantages import finite
from protocol.arrays import Float64s


def optimal_baseline(
    advantages: ArrayLike, weights: ArrayLike, score_squares: ArrayLike, groups: ArrayLike
) -> Float64s:
    r"""Return the baseline of each rollout group at which the variance of its stale gradient is least.

    .. math:: b^* = \frac{\sum_i w_i^2 g_i^2 R_i}{\sum_i w_i^2 g_i^2}, \quad
              w_i = \prod_t \frac{\pi(a_t)}{\mu(a_t)}, \quad g_i^2 = \|\nabla \log \pi(y_i)\|^2

    VCPO (arXiv:2602.17616), as in its program, for one group at a time. In place of returns R it may have advantages: a
    shift and a scale that all members share change b* alike.

    Args:
        advantages: [S], of the answers, or their returns.
        weights: w [S], >= 0, current over behaviour policy of whole answers.
        score_squares: g² [S], >= 0.
        groups: number of the rollout group of each answer, [S].

    Returns:
        b* of each answer's group, [S]; 0 where all weights or all scores of a group are 0.

    Raises:
        ValueError: a number is not finite, or the lengths differ.

    Example:
        >>> optimal_baseline([1.0, -1.0], [1.0, 0.5], [2.0, 8.0], [0, 0]), optimal_baseline([3.0], [1.0], [0.0], [0])
        (array([0., 0.]), array([0.]))
        >>> optimal_baseline([1.0, -1.0], [1.0, 1.0], [1.0, 3.0], [0, 0])
        array([-0.5, -0.5])
    """
    values = finite("advantages", advantages)
    shares = finite("weights", weights, len(values)) ** 2 * finite(
        "score_squares", score_squares, len(values)
    )
    numbers = np.asarray(groups, dtype=np.int64)
    total = np.bincount(numbers, weights=shares)
    sums = np.bincount(numbers, weights=shares * values)
    means = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    return means[numbers]


def score_square(probabilities: ArrayLike) -> Float64s:
    r"""Estimate the squared norm of each token's score, from the probability of the token alone.

    .. math:: (1 - \pi_t)^2 \le \|\nabla_z \log \pi_t\|^2 \le 2 (1 - \pi_t)^2

    The gradient with respect to the logits z has 1 - π at the sampled token and -π at the others, whose squares add up
    to at most (1 - π)². VCPO's program takes the norm over all weights instead, with a backward pass for each answer.

    Args:
        probabilities: π [N], in [0, 1].

    Returns:
        The lower one of the bounds, [N].

    Example:
        >>> score_square([1.0, 0.5])
        array([0.  , 0.25])
    """
    return (1.0 - finite("probabilities", probabilities)) ** 2


def balance_excess(log_ratios: ArrayLike, groups: ArrayLike) -> Float64s:
    r"""Return by how much an answer is likelier than its group, in comparison with the reference policy.

    .. math:: x_i - \tfrac{1}{G} \textstyle\sum_j x_j, \quad x_i = \log \pi(y_i) - \log \pi_\mathrm{ref}(y_i)

    Trajectory balance asks that log Z + x = R / β for every answer; VarGrad takes the mean of R / β - x over the group
    for log Z (TBA, arXiv:2503.18929, equation 3). So its gradient is that of REINFORCE with the advantage
    R - mean R - β times this excess.

    Args:
        log_ratios: x [S], nats, of whole answers.
        groups: number of the rollout group of each answer, [S].

    Returns:
        [S], nats, with mean 0 in each group.

    Raises:
        ValueError: a number is not finite.

    Example:
        >>> balance_excess([1.0, -1.0, 5.0], [0, 0, 1])
        array([ 1., -1.,  0.])
    """
    values, numbers = finite("log_ratios", log_ratios), np.asarray(groups, dtype=np.int64)
    sizes = np.bincount(numbers)
    means = np.bincount(numbers, weights=values) / np.maximum(1, sizes)
    centred: Float64s = values - means[numbers]
    return centred
