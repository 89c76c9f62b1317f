"""Inputs and measurements of the objective, as flat tensors [N]: one element per token with policy gradient."""

from dataclasses import dataclass

from torch import Tensor

from learner.algorithms.levels import Level
from learner.algorithms.ratios import level_ratio
from learner.settings.surrogates import Centre


@dataclass(frozen=True)
class Tokens:
    """Inputs of the objective that are known before the current policy has seen the tokens.

    All are float32 [N], except where noted, and have no gradient.
    """

    logp_behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    """Share of each token in the loss."""
    lag: Tensor
    """Policy lag, in versions."""
    sequence: Tensor
    """Id of each token's trajectory, int64; equal within a trajectory."""
    turn: Tensor
    """Id of each token's turn, int64; equal within a turn, different in different trajectories."""
    logp_proximal: Tensor | None = None
    """None means that the current policy is the proximal policy (first and only update on a batch)."""
    median_advantage: Tensor | None = None
    entropy_signal: Tensor | None = None
    logp_reference: Tensor | None = None
    logp_predecessor: Tensor | None = None
    entropy_multiplier: Tensor | None = None
    """Factor of the advantage by the token's entropy."""
    kept: Tensor | None = None
    """0 where a token is left out of the surrogate because it lowers the entropy most, else 1."""
    group_ratio: Tensor | None = None
    """Geometric mean of proximal / behaviour over the rollout group, whose tokens may be on several ranks."""


@dataclass(frozen=True)
class Adaptive:
    """Numbers that are equal for all tokens of an optimizer step, and change from step to step."""

    clip_low: float = 0.8
    """Lower bound of the ratio itself."""
    clip_high: float = 1.2
    """Upper bound of the ratio itself."""
    dual: float = 0.0
    entropy_coefficient: float = 0.0
    base_share: float = 1.0
    mirror_step: float = 1.0
    entropy_mean: float = 0.0
    """Mean entropy of all earlier updates, in nats."""
    band_coefficient: float = 0.0
    """Factor of the penalty on entropies outside the band; 0 before there is a mean."""


@dataclass(frozen=True)
class Diagnostics:
    """Measurements of each token, [N] each, detached."""

    logp_current: Tensor
    logp_proximal: Tensor
    logp_behaviour: Tensor
    entropy: Tensor
    loss: Tensor
    """The token's part of the loss. The parts of all tokens of a mini-batch add up to the loss."""
    clipped: Tensor
    truncated: Tensor
    correction: Tensor


@dataclass(frozen=True)
class View:
    """Log-probabilities of the tokens under all policies, from which a surrogate forms its ratios."""

    tokens: Tokens
    adaptive: Adaptive
    logp_current: Tensor
    logp_proximal: Tensor

    def ratio(self, centre: Centre, level: Level = "token") -> Tensor:
        """Return the ratio current / centre, with gradient."""
        below = self.logp_proximal if centre == "proximal" else self.tokens.logp_behaviour
        return level_ratio(
            self.logp_current, below, level=level, sequence=self.tokens.sequence, turn=self.tokens.turn
        )
