"""Rules of our own for stale tokens, tried on the frontier. They are formulas of the run file's kind "FILE.py:NAME"."""

import torch

from learner.algorithms.ratios import CorrectionValue, importance_ratio
from learner.algorithms.surrogates import SurrogateValue
from learner.algorithms.trust_regions import moves_away
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


class Fade(Section):
    """Settings of `faded`."""

    rate: float = 0.25
    least: float = 0.0
    """Lag of fresher tokens, too: with it old and fresh ones fade alike, which shows what the versions are worth."""


def faded(view: View, settings: Fade) -> CorrectionValue:
    r"""Weigh tokens of negative advantage the less the older they are; the others keep weight 1.

    .. math:: w_t = 1 \text{ if } A_t \ge 0 \text{ else } 1 / (1 + c \, l_t)

    What pays is still worth imitating when it is old, and imitating it ends at probability 1. Pushing away what did not
    pay has no end: while the same version goes on sampling it, each step pushes further.
    """
    weight = (1 / (1 + settings.rate * view.lag.clamp(min=settings.least))).where(
        view.advantage < 0, torch.ones_like(view.lag)
    )
    return CorrectionValue(weight, weight < 1)


class Narrowing(Section):
    """Settings of `narrowing`."""

    bound: float = 0.2
    half_at: float = 64.0


def narrowing(view: View, settings: Narrowing) -> SurrogateValue:
    r"""Mask tokens as DPPO does, with a bound on the shift of probability that narrows with the lag.

    .. math:: \delta_t = \delta / (1 + l_t / h)
    """
    ratio = view.ratio("behaviour")
    bound = settings.bound / (1 + view.lag / settings.half_at)
    masked = moves_away(ratio.detach(), view.advantage) & (view.distance("binary_tv") > bound)
    return SurrogateValue(torch.where(masked, 0, ratio * view.advantage), masked)
