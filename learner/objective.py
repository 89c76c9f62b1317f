"""The objective, put together from config: correction of staleness x surrogate, minus regularisers.

    loss = Σ_t weight_t · ( - c_t · surrogate(current / proximal, A_t)
                            - entropy_coefficient · H_t  +  kl_coefficient · k3_t )

All tensors are flat, [N]: one element per token that carries gradient, of whatever trajectory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.advantages import group_relative_advantage
from learner.algorithms.ratios import at_ceiling, importance_ratio, truncated_weight
from learner.algorithms.regularisers import kl_k3
from learner.algorithms.surrogates import clip_active, clipped_surrogate
from learner.config import (
    AdvantageConfig,
    AlgorithmConfig,
    ClipSurrogate,
    CorrectionConfig,
    GroupAdvantage,
    NoCorrection,
    SurrogateConfig,
    TruncatedCorrection,
)
from learner.trajectory import Trajectory


@dataclass(frozen=True)
class Tokens:
    """What is known of tokens before the current policy has seen them; float32 [N] each, no gradient."""

    logp_behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    """Share of each token in the loss; they sum to 1 over a mini-batch. 0 on dummies."""
    logp_proximal: Tensor | None = None
    """None: the current policy is the proximal one (first and only update on a batch)."""


@dataclass(frozen=True)
class Diagnostics:
    """Per token [N], detached."""

    logp_current: Tensor
    logp_proximal: Tensor
    entropy: Tensor
    loss: Tensor
    """The token's part of the loss; the parts of all tokens of a mini-batch add up to it."""
    clipped: Tensor
    truncated: Tensor


Objective = Callable[[Tokens, Tensor, Tensor], tuple[Tensor, Diagnostics]]
Correction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Surrogate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_objective(config: AlgorithmConfig) -> Objective:
    """Function of (tokens, logp_current [N] with gradient, entropy [N]) that gives (loss, diagnostics).

    Example:
        >>> lp = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> tokens = Tokens(lp.detach(), advantage=torch.tensor([1.0, -1.0]), weight=torch.tensor([0.5, 0.5]))
        >>> loss, _ = make_objective(AlgorithmConfig())(tokens, lp, torch.zeros(2))
        >>> loss.backward(); lp.grad
        tensor([-0.5000,  0.5000])
    """
    correct = make_correction(config.correction)
    surrogate = make_surrogate(config.surrogate)

    def objective(tokens: Tokens, logp_current: Tensor, entropy: Tensor) -> tuple[Tensor, Diagnostics]:
        logp_proximal = proximal_logp(config, tokens, logp_current)
        correction, truncated = correct(logp_proximal, tokens.logp_behaviour)
        value, clipped = surrogate(importance_ratio(logp_current, logp_proximal), tokens.advantage)
        per_token = -correction * value
        if config.entropy_coefficient:
            per_token = per_token - config.entropy_coefficient * entropy
        if config.kl_coefficient:
            per_token = per_token + config.kl_coefficient * kl_k3(logp_current, logp_proximal)
        parts = tokens.weight * per_token
        return parts.sum(), Diagnostics(
            logp_current=logp_current.detach(),
            logp_proximal=logp_proximal,
            entropy=entropy.detach(),
            loss=parts.detach(),
            clipped=clipped,
            truncated=truncated,
        )

    return objective


def proximal_logp(config: AlgorithmConfig, tokens: Tokens, logp_current: Tensor) -> Tensor:
    """Log-probabilities [N] under the policy the clip range is centred on; no gradient."""
    match config.proximal:
        case "behaviour":
            return tokens.logp_behaviour
        case "recomputed":
            return logp_current.detach() if tokens.logp_proximal is None else tokens.logp_proximal
        case _:
            assert_never(config.proximal)


def make_correction(config: CorrectionConfig) -> Correction:
    """Function of (logp_proximal, logp_behaviour) that gives (weight, where it was truncated), [N] each."""
    match config:
        case TruncatedCorrection(ceiling=ceiling):
            return lambda proximal, behaviour: (
                truncated_weight(proximal, behaviour, ceiling=ceiling),
                at_ceiling(proximal, behaviour, ceiling=ceiling),
            )
        case NoCorrection():
            return lambda proximal, _: (
                torch.ones_like(proximal),
                torch.zeros_like(proximal, dtype=torch.bool),
            )
        case _:
            assert_never(config)


def make_surrogate(config: SurrogateConfig) -> Surrogate:
    """Function of (ratio, advantage) that gives (objective, where the clip cut the gradient), [N] each."""
    match config:
        case ClipSurrogate(low=low, high=high):
            return lambda ratio, advantage: (
                clipped_surrogate(ratio, advantage, low=low, high=high),
                clip_active(ratio.detach(), advantage, low=low, high=high),
            )
        case _:
            assert_never(config)


def trajectory_advantages(config: AdvantageConfig, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    """Advantage of each trajectory, [S]; all of its tokens get the same."""
    returns = np.array([t.return_ for t in trajectories])
    groups = [t.group_id for t in trajectories]
    match config:
        case GroupAdvantage(scale=scale):
            return group_relative_advantage(returns, groups, scale=scale)
        case _:
            assert_never(config)
