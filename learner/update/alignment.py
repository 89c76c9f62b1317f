"""Gradients of consecutive optimizer steps: how much they point the same way, and a bound of it (GAC)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def overlap(cosine: float, norm: float, previous: float, *, ceiling: float) -> float:
    r"""Return how many times the previous gradient is taken off the present one, so that their cosine is the ceiling.

    .. math:: g' = g - s\, g^-, \quad s = \frac{|g|}{|g^-|} \Big(c - \kappa \sqrt{\tfrac{1 - c^2}{1 - \kappa^2}}\Big)
              \text{ if } c = \cos(g, g^-) > \kappa \text{ else } 0

    The part of g across the previous gradient stays. With the ceiling 0 it alone stays.

    Args:
        cosine: c, in [-1, 1].
        norm: \|g\|.
        previous: \|g⁻\|.
        ceiling: κ, in [0, 1).

    Returns:
        s >= 0; 0 where a gradient is 0.

    Example:
        >>> overlap(0.6, 2.0, 1.0, ceiling=0.0), overlap(0.1, 2.0, 1.0, ceiling=0.3)
        (1.2, 0.0)
    """
    if cosine <= ceiling or not norm or not previous:
        return 0.0
    kept = ceiling * math.sqrt(max(0.0, 1 - cosine**2) / (1 - ceiling**2))
    return norm / previous * (cosine - kept)


@dataclass
class GradientAlignment:
    """The gradient of the optimizer step before, with which the next one is compared.

    A run that goes on from a checkpoint begins without one.
    """

    ceiling: float
    """Largest cosine of a gradient with the one before."""
    _previous: list[Tensor] = field(default_factory=list, init=False)
    _norm: float = field(default=0.0, init=False)

    @torch.no_grad()
    def bound(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """Take off the present gradients, in place, what exceeds the ceiling, and remember them as they came.

        Args:
            parameters: those of the policy, whose gradients are reduced over the ranks already.

        Returns:
            The cosine with the gradient before, as it came; NaN without one, or where a gradient is not finite.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            return math.nan
        cosine, share = math.nan, 0.0
        if len(self._previous) == len(gradients) and norm and self._norm:
            products = [
                torch.dot(a.flatten(), b.flatten()) for a, b in zip(gradients, self._previous, strict=True)
            ]
            cosine = float(torch.stack(products).sum()) / (norm * self._norm)
            share = overlap(cosine, norm, self._norm, ceiling=self.ceiling)
        present = [gradient.clone() for gradient in gradients]
        if share:
            torch._foreach_sub_(gradients, self._previous, alpha=share)
        self._previous, self._norm = present, norm
        return cosine
