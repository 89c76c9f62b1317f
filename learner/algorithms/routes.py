"""Weights of experts that were chosen earlier, from the router's present numbers."""

import torch
from torch import Tensor


def replayed_weights(logits: Tensor, routes: Tensor, *, normalised: bool) -> Tensor:
    r"""Compute the weights of given experts, with gradient to the router.

    .. math:: g_i = \frac{\exp z_i}{\sum_{j \in R} \exp z_j} \text{ if normalised, else }
              \frac{\exp z_i}{\sum_j \exp z_j}, \qquad i \in R

    (Routing replay, arXiv:2512.01374.) R are experts that an earlier policy chose, z the router's logits under the
    present one. If R are the experts with the largest logits, these are the router's own weights, bit for bit.

    Args:
        logits: z, [n, E].
        routes: R, int64 [n, K], different experts in each row.
        normalised: whether the weights of the chosen experts add up to 1.

    Returns:
        g, float32 [n, K], each in [0, 1].

    Raises:
        ValueError: the numbers of rows differ.

    Example:
        >>> z = torch.tensor([[0.0, 1.0, 2.0]]).log1p()
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=True)
        tensor([[0.2500, 0.7500]])
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=False)
        tensor([[0.1667, 0.5000]])
    """
    if len(logits) != len(routes):
        raise ValueError(
            f"one row of experts for each row of logits, got {tuple(routes.shape)} and {tuple(logits.shape)}"
        )
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, routes)
    return weights / weights.sum(dim=-1, keepdim=True) if normalised else weights
