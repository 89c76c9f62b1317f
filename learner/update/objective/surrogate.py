"""The surrogate, the objective of each token, made from the config."""

import math
from collections.abc import Callable
from typing import assert_never

from torch import Tensor

from learner.algorithms import penalties, surrogates
from learner.algorithms.clipping import lag_bounds
from learner.algorithms.entropy.balance import gradient_keeping_surrogate
from learner.algorithms.entropy.bounds import hapo_bounds, hapo_redistribute
from learner.algorithms.ratios import importance_ratio
from learner.algorithms.surrogates import SurrogateValue
from learner.settings.surrogates import (
    BalancedSurrogate,
    BoundedSurrogate,
    ChunkSurrogate,
    ClipSurrogate,
    EntropySurrogate,
    LagSurrogate,
    MiniRlSurrogate,
    MirrorDescentSurrogate,
    RatioVarianceSurrogate,
    RegressionSurrogate,
    SurrogateConfig,
    TripletSurrogate,
    WeightedSurrogate,
    WindowSurrogate,
)
from learner.update.objective.tokens import View

Surrogate = Callable[[View], SurrogateValue]


def make_surrogate(config: SurrogateConfig) -> Surrogate:
    """Make the function of a `View` that returns (objective, where a bound cut the gradient), [N] each."""
    match config:
        case ClipSurrogate():
            return lambda v: _clipped(v, config)
        case WeightedSurrogate():
            return lambda v: _weighted(v, config)
        case MiniRlSurrogate():
            return lambda v: _minirl(v, config)
        case TripletSurrogate():
            return lambda v: _triplet(v, config)
        case ChunkSurrogate():
            return lambda v: surrogates.chunk_surrogate(
                v.logp_current, v.ratio("proximal", "turn"), v.tokens.advantage
            )
        case BalancedSurrogate():
            return lambda v: _balanced(v, config)
        case EntropySurrogate():
            return lambda v: _entropy_clip(v, config)
        case LagSurrogate():
            return lambda v: _lag_clip(v, config)
        case WindowSurrogate(epsilon=epsilon, centre_ceiling=ceiling):
            return lambda v: _window_clip(v, epsilon, ceiling or math.inf)
        case RatioVarianceSurrogate(centre=centre):
            return lambda v: penalties.ratio_variance_surrogate(
                v.ratio(centre), v.tokens.advantage, dual=v.adaptive.dual
            )
        case BoundedSurrogate():
            return lambda v: _bounded(v, config)
        case MirrorDescentSurrogate():
            return lambda v: penalties.mirror_descent_surrogate(
                v.ratio("proximal"), v.tokens.advantage, step_size=v.adaptive.mirror_step
            )
        case RegressionSurrogate(beta=beta):
            return lambda v: penalties.regression_surrogate(
                v.logp_current, v.tokens.logp_behaviour, v.tokens.advantage, v.tokens.turn, beta=beta
            )
        case _:
            assert_never(config)


def _clipped(view: View, config: ClipSurrogate) -> SurrogateValue:
    ratio, advantage = view.ratio(config.centre, config.level), view.tokens.advantage
    if config.keep_gradient:
        return gradient_keeping_surrogate(
            ratio, advantage, low=config.low, high=config.high, ceiling=config.dual or None
        )
    return _clip(ratio, advantage, config.low, config.high, config.dual)


def _weighted(view: View, config: WeightedSurrogate) -> SurrogateValue:
    return surrogates.weighted_surrogate(
        view.logp_current,
        view.ratio(config.centre),
        view.tokens.advantage,
        low=config.low,
        high=config.high,
    )


def _minirl(view: View, config: MiniRlSurrogate) -> SurrogateValue:
    return surrogates.minirl_surrogate(
        view.logp_current,
        view.ratio("proximal"),
        view.ratio("behaviour"),
        view.tokens.advantage,
        low=config.low,
        high=config.high,
        ceiling=config.ceiling,
    )


def _triplet(view: View, config: TripletSurrogate) -> SurrogateValue:
    return surrogates.triplet_clipped_surrogate(
        view.ratio("behaviour"),
        view.tokens.advantage,
        negative_low=config.negative_low,
        negative_high=config.negative_high,
        positive_high=config.positive_high,
    )


def _balanced(view: View, config: BalancedSurrogate) -> SurrogateValue:
    low, high = 1 - view.adaptive.clip_low, view.adaptive.clip_high - 1
    return _clip(view.ratio(config.centre), view.tokens.advantage, low, high, config.dual)


def _lag_clip(view: View, config: LagSurrogate) -> SurrogateValue:
    low, high = lag_bounds(view.tokens.lag, low=config.low, high=config.high, contraction=config.contraction)
    return _clip(view.ratio("proximal"), view.tokens.advantage, low, high, config.dual)


def _clip(
    ratio: Tensor, advantage: Tensor, low: float | Tensor, high: float | Tensor, dual: float
) -> SurrogateValue:
    return surrogates.dual_clipped_surrogate(
        ratio, advantage, low=low, high=high, ceiling=dual if dual else None
    )


def _window_clip(view: View, epsilon: float, ceiling: float) -> SurrogateValue:
    """Clip to a window around the ratio proximal / behaviour, and limit the weight of tokens to the ceiling.

    The ceiling does not move the window. Where the centre is above the ceiling, the objective is multiplied
    by ceiling / centre, so that the token's weight is the ceiling.
    """
    centre = importance_ratio(view.logp_proximal, view.tokens.logp_behaviour)
    value, clipped = surrogates.window_clipped_surrogate(
        view.ratio("behaviour"), centre, view.tokens.advantage, epsilon=epsilon
    )
    return SurrogateValue(value * (ceiling / centre).clamp(max=1.0), clipped)


def _entropy_clip(view: View, config: EntropySurrogate) -> SurrogateValue:
    signal = view.tokens.entropy_signal
    assert signal is not None
    ratio, advantage = view.ratio("proximal"), view.tokens.advantage
    low, high = hapo_bounds(signal, low=config.low, high=config.high)
    if config.redistribute:
        advantage = hapo_redistribute(advantage, ratio.detach(), signal, low=config.low, high=config.high)
    return _clip(ratio, advantage, low, high, config.dual)


def _bounded(view: View, config: BoundedSurrogate) -> SurrogateValue:
    median_advantage = view.tokens.median_advantage
    assert median_advantage is not None
    target = penalties.bounded_target(
        median_advantage, low=config.low, high=config.high, temperature=config.temperature
    )
    return penalties.bounded_surrogate(view.ratio(config.centre), target, view.tokens.advantage.abs())
