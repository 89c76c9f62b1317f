"""Formulas as a user writes them in a file of his own: copies of shipped ones, written from their formulas."""

from typing import Literal

import numpy as np
import torch

from learner.formulas import Members, Reward, Rollouts, Section
from learner.update.objective import CorrectionValue, SurrogateValue, View


class Clip(Section):
    low: float = 0.2
    high: float = 0.28
    centre: Literal["proximal", "behaviour"] = "proximal"


def clip(view: View, settings: Clip) -> SurrogateValue:
    ratio, advantage = view.ratio(settings.centre), view.advantage
    above = (advantage > 0) & (ratio > 1 + settings.high)
    below = (advantage < 0) & (ratio < 1 - settings.low)
    bounded = torch.where(above, 1 + settings.high, torch.where(below, 1 - settings.low, ratio))
    return SurrogateValue(bounded * advantage, above | below)


class Truncated(Section):
    ceiling: float = 2.0


def truncated(view: View, settings: Truncated) -> CorrectionValue:
    ratio = (view.logp_proximal - view.logp_behaviour).clamp(-20, 20).exp()
    return CorrectionValue(ratio.clamp(max=settings.ceiling), ratio > settings.ceiling)


def group(rollouts: Rollouts) -> np.ndarray:
    advantages = np.zeros(len(rollouts.returns))
    for number in np.unique(rollouts.group):
        members = rollouts.group == number
        values = rollouts.returns[members]
        if np.ptp(values) > 1e-9 * max(1.0, np.abs(values).max()):
            advantages[members] = (values - values.mean()) / (values.std() + 1e-6)
    return advantages


def as_given(members: Members) -> list[list[Reward]]:
    return [list(t.rewards) for t in members.trajectories]


def by_length(view: View) -> SurrogateValue:
    """REINFORCE of each trajectory's mean token, with what only a view of own formulas has."""
    fresh = (view.version == view.adaptive.version).float()
    value = view.logp_current * view.advantage * fresh / view.length
    return SurrogateValue(value, torch.zeros_like(value, dtype=torch.bool))
