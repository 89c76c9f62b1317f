"""Rules of our own for stale tokens, tried on the frontier. They are formulas of the run file's kind "FILE.py:NAME"."""

import torch

from learner.algorithms.ratios import CorrectionValue, importance_ratio
from learner.formulas import Section
from learner.update.objective import View


class Ceiling(Section):
    """Settings of `normalised`."""

    ceiling: float = 2.0


def normalised(view: View, settings: Ceiling) -> CorrectionValue:
    r"""Weigh tokens by their ratio proximal / behaviour, scaled to mean 1 over the tokens of equal lag.

    .. math:: w_t = \min(r_t, c) \, \frac{n_l}{\sum_{s: l_s = l} \min(r_s, c)}

    Only a system that knows the version of each token can do that: tokens of one version have one behaviour policy.
    """
    ratio = importance_ratio(view.logp_proximal, view.tokens.logp_behaviour)
    weight = ratio.clamp(max=settings.ceiling)
    for lag in torch.unique(view.tokens.lag):
        same = view.tokens.lag == lag
        weight = weight.where(~same, weight / weight[same].mean().clamp(min=1e-6))
    return CorrectionValue(weight, ratio > settings.ceiling)
