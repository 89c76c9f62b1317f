"""Weights of experts that were chosen earlier, from the router's present numbers."""

from typing import Literal

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid"]
"""Function of a router's logits from which it forms the experts' weights."""


def replayed_weights(
    logits: Tensor, routes: Tensor, *, normalised: bool, score: Score = "softmax", scale: float = 1.0
) -> Tensor:
    r"""Compute the weights of given experts, with gradient to the router.

    .. math:: g_i = \frac{c\, s_i}{\sum_{j \in R} s_j} \text{ if normalised, else } c\, s_i, \qquad i \in R

    (Routing replay, arXiv:2512.01374, which writes it for the normalised softmax: s = exp z and c = 1.) R are experts
    that an earlier policy chose, z the router's logits under the present one. The scores s are the softmax of z over
    all experts, or the sigmoid of z (DeepSeek V3, arXiv:2412.19437). If R are the experts that the router chooses now,
    these are its own weights: bit for bit, if it takes the score of all experts first.

    Args:
        logits: z, [n, E].
        routes: R, int64 [n, K], different experts in each row.
        normalised: whether the weights of the chosen experts add up to c.
        score: how s follows from z.
        scale: c, above 0.

    Returns:
        g, float32 [n, K], each in [0, c].

    Raises:
        ValueError: the numbers of rows differ.

    Example:
        >>> z = torch.tensor([[0.0, 1.0, 2.0]]).log1p()
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=True)
        tensor([[0.2500, 0.7500]])
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=False)
        tensor([[0.1667, 0.5000]])
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=False, score="sigmoid", scale=2.0)
        tensor([[1.0000, 1.5000]])
    """
    if len(logits) != len(routes):
        raise ValueError(
            f"one row of experts for each row of logits, got {tuple(routes.shape)} and {tuple(logits.shape)}"
        )
    scores = (
        torch.softmax(logits, dim=-1, dtype=torch.float) if score == "softmax" else logits.float().sigmoid()
    )
    weights = scores.gather(1, routes)
    return scale * (weights / weights.sum(dim=-1, keepdim=True) if normalised else weights)
