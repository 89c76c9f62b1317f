"""The objective, put together from the config: corrections of staleness x surrogate, minus regularisers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from learner.algorithms import penalties, surrogates, trust_regions
from learner.algorithms.entropy import gradient_keeping_surrogate, hapo_bounds, hapo_redistribute
from learner.algorithms.ratios import (
    CorrectionValue,
    importance_ratio,
    interpolated_proximal,
    interval_correction,
    level_ratio,
    product_ratio,
    truncated_correction,
)
from learner.algorithms.regularisers import (
    distillation_advantage,
    entropy_band_penalty,
    kl_convex,
    kl_estimate,
)
from learner.algorithms.surrogates import SurrogateValue, lag_bounds
from learner.algorithms.tokens import Level
from learner.algorithms.trust_regions import Statistic
from learner.formulas import Formula, load_formula
from learner.settings.algorithm import AlgorithmConfig, KlConfig, KlConvex, KlPenalty
from learner.settings.corrections import (
    CorrectionConfig,
    DivergenceCorrection,
    IntervalCorrection,
    TruncatedCorrection,
)
from learner.settings.distillation import Distillation
from learner.settings.formulas import OwnCorrection, OwnSurrogate
from learner.settings.origins import OriginLoss
from learner.settings.siblings import SiblingDistillation
from learner.settings.surrogates import (
    BalancedSurrogate,
    BoundedSurrogate,
    Centre,
    ChunkSurrogate,
    ClipSurrogate,
    EntropySurrogate,
    GammaSurrogate,
    LagSurrogate,
    MiniRlSurrogate,
    MirrorDescentSurrogate,
    QuadraticPullSurrogate,
    RatioVarianceSurrogate,
    RegressionSurrogate,
    SecondMomentSurrogate,
    ShapedSurrogate,
    SurrogateConfig,
    TailSurrogate,
    TrajectoryBalanceSurrogate,
    TripletSurrogate,
    TrustRegionSurrogate,
    WeightedSurrogate,
    WindowSurrogate,
)

__all__ = [
    "CorrectionValue",
    "SurrogateValue",
    "View",
    "make_corrections",
    "make_objective",
    "make_surrogate",
]


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
    logp_teacher: Tensor | None = None
    logp_average: Tensor | None = None
    """Under the average of the policy that has read a solved sibling; 0 where there is none."""
    sibling_weight: Tensor | None = None
    """How much the token learns from that average; 0: it learns from its rewards."""
    entropy_multiplier: Tensor | None = None
    """Factor of the advantage by the token's entropy."""
    kept: Tensor | None = None
    """0 where a token is left out of the surrogate because it lowers the entropy most, else 1."""
    group_ratio: Tensor | None = None
    """Geometric mean of proximal / behaviour over the rollout group, whose tokens may be on several ranks."""
    baseline: Tensor | None = None
    """What is taken off the advantage, equal within a rollout group."""
    balance_excess: Tensor | None = None
    """By how much the token's trajectory is likelier than its group, compared with the reference model, in nats."""
    group: Tensor | None = None
    """Number of the rollout group of each token's trajectory in the batch, int64."""
    length: Tensor | None = None
    """Number of tokens of each token's trajectory that carry policy gradient."""
    lane: Tensor | None = None
    """True where the token was sampled at another temperature than the one of training, bool; None: nowhere."""
    foreign: Tensor | None = None
    """True where another policy wrote the token, so that it has no behaviour probability, bool; None: nowhere."""
    loss_number: Tensor | None = None
    """Entry of `by_origin` whose loss the token has, from 1, int64; 0: the algorithm's own. None: there are no entries.
    """


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
    threshold: float = math.inf
    """Number that a surrogate takes from all tokens of the step: what it keeps, caps or contracts beyond."""
    entropy_mean: float = 0.0
    """Mean entropy of all earlier updates, in nats."""
    band_coefficient: float = 0.0
    """Factor of the penalty on entropies outside the band; 0 before there is a mean."""
    version: int = 0
    """Policy version that the step updates."""


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
    advantage: Tensor
    """Advantage that the surrogate had, the factor of the token's entropy included."""
    weight: Tensor
    """Share of the token in the loss."""
    teacher_distance: Tensor
    """log proximal - log teacher; 0 without a teacher."""


@dataclass(frozen=True)
class View:
    """What a surrogate or a correction is computed from: N tokens, and their log-probabilities under all policies.

    The tokens are those of a micro-batch that carry policy gradient, so N may be 0. How trajectories are dealt to
    micro-batches and ranks is chance: what a formula says of a token must not depend on other trajectories. All tensors
    are float32 [N], except where noted, and only `logp_current` has a gradient.
    """

    tokens: Tokens
    """All that is known of the tokens."""
    adaptive: Adaptive
    """Numbers of the step."""
    logp_current: Tensor
    """Under the policy that is trained; with gradient."""
    logp_proximal: Tensor
    """Under the proximal policy, see `learner.algorithm.proximal`."""

    @property
    def logp_behaviour(self) -> Tensor:
        """Under the policy that sampled the token."""
        return self.tokens.logp_behaviour

    @property
    def advantage(self) -> Tensor:
        """Advantage of each token."""
        return self.tokens.advantage

    @property
    def weight(self) -> Tensor:
        """Share of each token in the loss, with which the objective is multiplied later."""
        return self.tokens.weight

    @property
    def lag(self) -> Tensor:
        """Policy lag, in versions."""
        return self.tokens.lag

    @property
    def version(self) -> Tensor:
        """Policy version that sampled the token, int64."""
        return self.adaptive.version - self.tokens.lag.long()

    @property
    def sequence(self) -> Tensor:
        """Number of each token's trajectory in this view, int64."""
        return self.tokens.sequence

    @property
    def turn(self) -> Tensor:
        """Number of each token's turn, int64; different in different trajectories."""
        return self.tokens.turn

    @property
    def group(self) -> Tensor:
        """Number of the rollout group of each token's trajectory in the batch, int64."""
        assert self.tokens.group is not None
        return self.tokens.group

    @property
    def length(self) -> Tensor:
        """Number of tokens of each token's trajectory that carry policy gradient."""
        assert self.tokens.length is not None
        return self.tokens.length

    def ratio(self, centre: Centre, level: Level = "token") -> Tensor:
        """Return the ratio current / centre, with gradient."""
        below = self.logp_proximal if centre == "proximal" else self.tokens.logp_behaviour
        return level_ratio(
            self.logp_current, below, level=level, sequence=self.tokens.sequence, turn=self.tokens.turn
        )

    def distance(self, statistic: Statistic) -> Tensor:
        """Return the distance of the current from the behaviour policy at each token, without gradient."""
        return trust_regions.divergence(self.logp_current, self.tokens.logp_behaviour, statistic=statistic)


Correction = Callable[[View], CorrectionValue]


def make_corrections(configs: Sequence[CorrectionConfig]) -> Callable[[View], CorrectionValue]:
    """Make the function of a `View` that returns the product of all weights, and where any of them was cut."""
    parts = [_make_correction(config, index) for index, config in enumerate(configs)]

    def correct(view: View) -> CorrectionValue:
        weight = torch.ones_like(view.logp_proximal)
        cut = torch.zeros_like(view.logp_proximal, dtype=torch.bool)
        for part in parts:
            factor, where = part(view)
            weight, cut = weight * factor, cut | where
        return CorrectionValue(weight, cut)

    return correct


def _make_correction(config: CorrectionConfig, index: int) -> Correction:
    if isinstance(config, OwnCorrection):
        return _own_correction(config, index)
    if isinstance(config, DivergenceCorrection):
        return lambda view: _divergence_correction(view, config)
    level = config.level

    def ratio(view: View) -> Tensor:
        tokens, logp_proximal = view.tokens, view.logp_proximal
        if level == "group":
            assert tokens.group_ratio is not None
            return tokens.group_ratio
        if level == "product":
            return product_ratio(logp_proximal, tokens.logp_behaviour, tokens.sequence)
        return level_ratio(
            logp_proximal,
            tokens.logp_behaviour,
            level=level,
            sequence=tokens.sequence,
            turn=tokens.turn,
        )

    match config:
        case TruncatedCorrection(ceiling=ceiling):
            return lambda view: truncated_correction(ratio(view), ceiling=ceiling)
        case IntervalCorrection(low=low, high=high, weight=weight):
            return lambda view: interval_correction(ratio(view), low=low, high=high, keep_weight=weight)
        case _:
            assert_never(config)


def _divergence_correction(view: View, config: DivergenceCorrection) -> CorrectionValue:
    tokens, proximal = view.tokens, view.logp_proximal
    segment = {"token": None, "turn": tokens.turn, "sequence": tokens.sequence}[config.level]
    distance = trust_regions.divergence(proximal, tokens.logp_behaviour, statistic=config.statistic)
    distance = trust_regions.over_segment(distance, segment, over=config.over)
    ratio = importance_ratio(proximal, tokens.logp_behaviour)
    return trust_regions.divergence_correction(
        distance, ratio if config.weight else torch.ones_like(ratio), bound=config.bound
    )


def _own_correction(config: OwnCorrection, index: int) -> Correction:
    formula = load_formula(config, f"learner.algorithm.corrections.{index}")

    def correct(view: View) -> CorrectionValue:
        with torch.no_grad():
            result = formula(view)
        if not isinstance(result, CorrectionValue):
            raise formula.refused(f"returned {type(result).__name__}; return a CorrectionValue(weight, cut)")
        _check_result(formula, view, weight=result.weight, cut=result.cut)
        return result

    return correct


def _own_surrogate(config: OwnSurrogate) -> "Surrogate":
    formula = load_formula(config, "learner.algorithm.surrogate")

    def surrogate(view: View) -> SurrogateValue:
        result = formula(view)
        if not isinstance(result, SurrogateValue):
            raise formula.refused(
                f"returned {type(result).__name__}; return a SurrogateValue(value, clipped)"
            )
        _check_result(formula, view, value=result.value, clipped=result.clipped)
        return result

    return surrogate


def _check_result(formula: Formula, view: View, **results: Tensor) -> None:
    """Check that one result is a number and the other one a bool of each token. The host waits for no GPU here."""
    expected = view.logp_current.shape
    for (name, result), dtype in zip(results.items(), (view.logp_current.dtype, torch.bool), strict=True):
        if not isinstance(result, Tensor):
            raise formula.refused(f"returned {name} as {type(result).__name__}; it has to be a tensor")
        if result.shape != expected:
            raise formula.refused(
                f"returned {name} of shape {tuple(result.shape)} for {tuple(expected)} tokens; return one for each "
                "token, and let the objective add them up"
            )
        if result.dtype != dtype:
            raise formula.refused(f"returned {name} as {result.dtype}; it has to be {dtype}")


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
        case OwnSurrogate():
            return _own_surrogate(config)
        case TrustRegionSurrogate(statistic=statistic, bound=bound):
            return lambda v: trust_regions.trust_region_surrogate(
                v.ratio("behaviour"), v.tokens.advantage, v.distance(statistic), bound=bound
            )
        case SecondMomentSurrogate():
            return lambda v: _second_moment(v, config)
        case TailSurrogate():
            return lambda v: _tail_clip(v, config)
        case QuadraticPullSurrogate(bound=bound):
            return lambda v: trust_regions.quadratic_pull_surrogate(
                v.ratio("behaviour"), v.tokens.advantage, v.tokens.logp_behaviour, bound=bound
            )
        case GammaSurrogate():
            return lambda v: _gamma(v, config)
        case TrajectoryBalanceSurrogate(beta=beta):
            return lambda v: _trajectory_balance(v, beta)
        case ShapedSurrogate(shaping=shaping):
            return lambda v: surrogates.shaped_surrogate(v.logp_current, v.tokens.advantage, shaping=shaping)
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
        reject=config.outside == "reject",
    )


def _second_moment(view: View, config: SecondMomentSurrogate) -> SurrogateValue:
    ratio, advantage, threshold = view.ratio("behaviour"), view.tokens.advantage, view.adaptive.threshold
    if config.form == "mask":
        distance = view.distance("log_square")
        return trust_regions.trust_region_surrogate(ratio, advantage, distance, bound=threshold)
    low, high = max(config.low, 1 - math.exp(-threshold)), max(config.high, math.expm1(min(threshold, 20.0)))
    return _clip(ratio, advantage, low, high, 0.0)


def _tail_clip(view: View, config: TailSurrogate) -> SurrogateValue:
    low, high = trust_regions.tail_bounds(
        view.logp_current - view.tokens.logp_behaviour,
        threshold=view.adaptive.threshold,
        low=config.low,
        high=config.high,
        power=config.power,
    )
    return _clip(view.ratio("behaviour"), view.tokens.advantage, low, high, 0.0)


def _gamma(view: View, config: GammaSurrogate) -> SurrogateValue:
    weight = product_ratio(view.logp_current.detach(), view.tokens.logp_behaviour, view.tokens.sequence)
    kernel = trust_regions.gamma_kernel(
        weight,
        view.tokens.advantage,
        positive=(config.positive_power, config.positive_rate),
        negative=(config.negative_power, config.negative_rate),
    )
    return surrogates.unclipped(kernel * view.tokens.advantage * view.logp_current)


def _trajectory_balance(view: View, beta: float) -> SurrogateValue:
    excess = view.tokens.balance_excess
    assert excess is not None
    return surrogates.unclipped((view.tokens.advantage - beta * excess) * view.logp_current)


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


Loss = Callable[[View], tuple[CorrectionValue, SurrogateValue]]


def make_loss(config: AlgorithmConfig) -> Loss:
    """Make the function of a `View` that returns corrections and surrogate of each token, by its origin."""
    own = _loss_of(config.corrections, config.surrogate)
    if not config.by_origin:
        return own
    losses = [own, *(_origin_loss(each, own) for each in config.by_origin)]

    def by_origin(view: View) -> tuple[CorrectionValue, SurrogateValue]:
        number = view.tokens.loss_number
        assert number is not None
        weight, value = torch.ones_like(view.logp_proximal), torch.zeros_like(view.logp_current)
        cut = clipped = torch.zeros_like(view.logp_proximal, dtype=torch.bool)
        for place, loss in enumerate(losses):
            here = number == place
            correction, part = loss(_only(view, here))
            weight, cut = torch.where(here, correction.weight, weight), torch.where(here, correction.cut, cut)
            value = torch.where(here, part.value, value)
            clipped = torch.where(here, part.clipped, clipped)
        return CorrectionValue(weight, cut), SurrogateValue(value, clipped)

    return by_origin


def _loss_of(corrections: Sequence[CorrectionConfig], surrogate: SurrogateConfig) -> Loss:
    correct, objective = make_corrections(corrections), make_surrogate(surrogate)
    return lambda view: (correct(view), objective(view))


def _origin_loss(config: OriginLoss, own: Loss) -> Loss:
    loss = own if config.surrogate is None else _loss_of(config.corrections or (), config.surrogate)

    def weighted(view: View) -> tuple[CorrectionValue, SurrogateValue]:
        correction, (value, clipped) = loss(view)
        return correction, SurrogateValue(config.weight * value, clipped)

    return weighted


def _only(view: View, here: Tensor) -> View:
    """Return a view in which all other tokens have the ratio 1, so that what is not wanted of them is finite.

    They stay in it: to leave them out, the host would have to wait for a GPU that counts them.
    """
    current = view.logp_current.detach()
    tokens = replace(view.tokens, logp_behaviour=torch.where(here, view.tokens.logp_behaviour, current))
    return replace(view, tokens=tokens, logp_proximal=torch.where(here, view.logp_proximal, current))


Objective = Callable[[Tokens, Adaptive, Tensor, Tensor], tuple[Tensor, Diagnostics]]
Kl = Callable[[View], Tensor]


def make_objective(config: AlgorithmConfig) -> Objective:
    """Make the objective, a function that returns (loss, diagnostics).

    Its arguments are (tokens, adaptive, logp_current [N] with gradient, entropy [N]).

    Example:
        >>> import torch
        >>> lp, row = torch.tensor([-1.0, -2.0], requires_grad=True), torch.zeros(2, dtype=torch.int64)
        >>> tokens = Tokens(lp.detach(), advantage=torch.tensor([1.0, -1.0]), weight=torch.tensor([0.5, 0.5]),
        ...     lag=torch.zeros(2), sequence=row, turn=row)
        >>> loss, _ = make_objective(AlgorithmConfig())(tokens, Adaptive(), lp, torch.zeros(2))
        >>> loss.backward(); lp.grad
        tensor([-0.5000,  0.5000])
    """
    loss = make_loss(config)
    kl = make_kl(config.kl) if config.kl else None

    def objective(
        tokens: Tokens, adaptive: Adaptive, logp_current: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Diagnostics]:
        if tokens.baseline is not None:
            tokens = replace(tokens, advantage=tokens.advantage - tokens.baseline)
        if tokens.entropy_multiplier is not None:
            tokens = replace(tokens, advantage=tokens.advantage * tokens.entropy_multiplier)
        for unknown in (tokens.lane, tokens.foreign):
            if unknown is not None:
                # The behaviour probability is that of another temperature, or nobody's. A ratio of 1 makes the clip
                # REINFORCE.
                behaviour = torch.where(unknown, logp_current.detach(), tokens.logp_behaviour)
                tokens = replace(tokens, logp_behaviour=behaviour)
        logp_proximal = proximal_logp(config, tokens, logp_current)
        if tokens.lane is not None:
            logp_proximal = torch.where(tokens.lane, tokens.logp_behaviour, logp_proximal)
        tokens, distance = taught(config.distillation, tokens, logp_proximal)
        if config.siblings is not None:
            tokens = taught_by_siblings(config.siblings, tokens, logp_proximal)
        view = View(tokens, adaptive, logp_current, logp_proximal)
        (correction, truncated), (value, clipped) = loss(view)
        if tokens.kept is not None:
            value, clipped = value * tokens.kept, clipped | (tokens.kept == 0)
        per_token = -correction * value
        if adaptive.entropy_coefficient:
            per_token = per_token - adaptive.entropy_coefficient * entropy
        if config.entropy.band is not None and adaptive.band_coefficient:
            low, high = config.entropy.band.low, config.entropy.band.high
            outside = entropy_band_penalty(entropy, mean=adaptive.entropy_mean, low=low, high=high)
            per_token = per_token + adaptive.band_coefficient * outside
        if kl is not None:
            per_token = per_token + kl(view)
        parts = tokens.weight * per_token
        return parts.sum(), Diagnostics(
            logp_current=logp_current.detach(),
            logp_proximal=view.logp_proximal,
            logp_behaviour=tokens.logp_behaviour,
            entropy=entropy.detach(),
            loss=parts.detach(),
            clipped=clipped,
            truncated=truncated,
            correction=correction,
            advantage=tokens.advantage,
            weight=tokens.weight,
            teacher_distance=distance,
        )

    return objective


def taught(config: Distillation | None, tokens: Tokens, logp_proximal: Tensor) -> tuple[Tokens, Tensor]:
    """Return tokens whose advantage is, or has in it, what a teacher says; and log proximal - log teacher, [N]."""
    if config is None:
        return tokens, torch.zeros_like(logp_proximal)
    assert tokens.logp_teacher is not None
    signal = distillation_advantage(tokens.logp_teacher, logp_proximal, limit=config.limit)
    advantage = config.coefficient * signal + (tokens.advantage if config.rewards else 0.0)
    return replace(tokens, advantage=advantage), -signal


def taught_by_siblings(config: SiblingDistillation, tokens: Tokens, logp_proximal: Tensor) -> Tokens:
    """Return tokens whose advantage is what the average says, where they have a solved sibling."""
    assert tokens.logp_average is not None
    assert tokens.sibling_weight is not None
    signal = distillation_advantage(tokens.logp_average, logp_proximal, limit=config.limit)
    advantage = torch.where(tokens.sibling_weight > 0, tokens.sibling_weight * signal, tokens.advantage)
    return replace(tokens, advantage=advantage)


def proximal_logp(config: AlgorithmConfig, tokens: Tokens, logp_current: Tensor) -> Tensor:
    """Return the log-probabilities [N] under the proximal policy, without gradient."""
    match config.proximal:
        case "behaviour":
            return tokens.logp_behaviour
        case "interpolated":
            # After the first step on a batch, the current policy is no longer a centre for fresh tokens.
            several = config.updates_per_batch * config.passes > 1
            return interpolated_proximal(
                tokens.logp_behaviour, logp_current, tokens.lag, fresh="behaviour" if several else "current"
            )
        case "recomputed":
            return logp_current.detach() if tokens.logp_proximal is None else tokens.logp_proximal
        case _:
            assert_never(config.proximal)


def make_kl(config: KlConfig) -> Kl:
    """Make the function of a `View` that returns the penalty [N], its coefficient included."""
    match config:
        case KlPenalty(coefficient=coefficient, to=to, estimator=estimator):

            def penalty(view: View) -> Tensor:
                other = view.logp_proximal if to == "proximal" else view.tokens.logp_reference
                assert other is not None
                return coefficient * kl_estimate(view.logp_current, other, estimator=estimator)

            return penalty
        case KlConvex(coefficient=coefficient, estimator=estimator):

            def convex(view: View) -> Tensor:
                base, predecessor = view.tokens.logp_reference, view.tokens.logp_predecessor
                assert base is not None
                assert predecessor is not None
                return coefficient * kl_convex(
                    view.logp_current,
                    base,
                    predecessor,
                    base_share=view.adaptive.base_share,
                    estimator=estimator,
                )

            return convex
        case _:
            assert_never(config)
