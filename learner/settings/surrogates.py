"""Surrogates: the objective of a token, from its advantage and the ratio of the current to an older policy."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from learner.algorithms.tokens import Level
from learner.settings.corrections import Statistic
from learner.settings.formulas import OwnSurrogate
from protocol.section import OWN, SHIPPED, Section, form_of

Centre = Literal["proximal", "behaviour"]
LowHalfWidth = Annotated[float, Field(ge=0, le=1)]
HalfWidth = Annotated[float, Field(ge=0)]


def _dual(field: str, dual: float, *, above: float) -> Iterator[str]:
    if 0 < dual <= above:
        yield (
            f"{field}.dual is {dual:g}, not above the clip's own upper bound {above:g}: it would cut what the clip "
            "lets through; raise it, or set 0 for none"
        )


class ClipSurrogate(Section):
    """PPO clip of the ratio current / centre to [1 - low, 1 + high] (arXiv:1707.06347)."""

    kind: Literal["clip"] = "clip"
    low: LowHalfWidth = 0.2
    """Distance of the lower bound from 1. 0 to 1."""
    high: HalfWidth = 0.28
    """Distance of the upper bound from 1. At least 0."""
    dual: float = Field(0.0, ge=0)
    """Dual clip: largest ratio that counts where the advantage is negative. 0: no dual clip; else above
    1 + high."""
    level: Level = "token"
    """Tokens that share one ratio. "token": each has its own; else the geometric mean over the tokens of
    "turn": the turn, "sequence": the trajectory (GSPO, arXiv:2507.18071)."""
    centre: Centre = "proximal"
    """Policy in the denominator of the ratio."""
    keep_gradient: bool = False
    """True if a token above the upper bound keeps the gradient (1 + high) times the advantage (AEPO,
    arXiv:2510.14545). False: it has none."""

    def contradictions(self, field: str) -> Iterator[str]:
        yield from _dual(field, self.dual, above=1 + self.high)


class WeightedSurrogate(Section):
    """REINFORCE weighted by the ratio current / centre, which is bounded to [low, high] and carries no
    gradient (CISPO, arXiv:2506.13585; AIPO, arXiv:2505.24034)."""

    kind: Literal["weighted"] = "weighted"
    low: float = Field(0.0, ge=0)
    """Smallest weight. At least 0, at most `high`."""
    high: float = Field(2.0, gt=0)
    """Largest weight. Above 0."""
    outside: Literal["bound", "reject"] = "bound"
    """Weight where the ratio is outside. "bound": the nearest bound, so that no token loses its gradient; "reject": 0,
    whatever the sign of the advantage (SAO, arXiv:2607.07508)."""
    centre: Centre = "behaviour"
    """Policy in the denominator of the ratio."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.low > self.high:
            yield f"{field}: low {self.low:g} is above high {self.high:g}; lower low"
        if self.outside == "reject" and not self.low <= 1 <= self.high:
            yield (
                f'{field}: low {self.low:g}, high {self.high:g} with outside = "reject": fresh tokens, whose ratio is '
                "1, would get no gradient; let the bounds contain 1"
            )


class MiniRlSurrogate(Section):
    """REINFORCE with weight min(ceiling, current / behaviour), where PPO would not clip the ratio
    current / proximal; other tokens are masked out (MiniRL, arXiv:2512.01374)."""

    kind: Literal["minirl"] = "minirl"
    low: LowHalfWidth = 0.2
    """Distance of the lower bound of current / proximal from 1. 0 to 1."""
    high: HalfWidth = 0.27
    """Distance of the upper bound of current / proximal from 1. At least 0."""
    ceiling: float = Field(5.0, gt=0)
    """Largest weight. Above 0."""


class TripletSurrogate(Section):
    """Asymmetric clip of the ratio current / behaviour with three bounds (HisPO, arXiv:2603.21065). Two
    corrections of kind "interval" give HisPO's two-level mask."""

    kind: Literal["triplet"] = "triplet"
    negative_low: float = Field(0.8, ge=0)
    """Smallest ratio where the advantage is negative. At least 0, below `negative_high`."""
    negative_high: float = Field(5.0, gt=0)
    """Largest ratio where the advantage is negative. Above 0."""
    positive_high: float = Field(1.28, gt=0)
    """Largest ratio where the advantage is positive. Above 0."""

    def contradictions(self, field: str) -> Iterator[str]:
        low, high = self.negative_low, self.negative_high
        if low >= high:
            yield f"{field}: negative_low {low:g} is not below negative_high {high:g}; lower it"
        no_gradient = "fresh tokens, whose ratio is 1, would get no gradient; set it to"
        if 1 < low < high:
            yield f"{field}.negative_low is {low:g}: {no_gradient} at most 1"
        if self.positive_high < 1:
            yield f"{field}.positive_high is {self.positive_high:g}: {no_gradient} at least 1"


class ChunkSurrogate(Section):
    """Imitation, weighted by the advantage, where the advantage is positive. Where it is negative, REINFORCE
    weighted by the ratio current / proximal of the whole turn, at most 1 (IPA, arXiv:2512.24873)."""

    kind: Literal["chunk"] = "chunk"


class BalancedSurrogate(Section):
    """Clip whose bounds move at each optimizer step until tokens with positive advantage hold a given share
    of the surrogate (BAPO, arXiv:2510.18927). The bounds apply to the ratio itself:
    low_start <= low_stop < 1 < high_start <= high_stop."""

    kind: Literal["balanced"] = "balanced"
    target: float = Field(0.4, ge=0, le=1)
    """Share of the surrogate that tokens with positive advantage must hold. 0 to 1."""
    low_start: float = Field(0.6, ge=0)
    """Lower bound at which the search starts. At least 0."""
    low_stop: float = Field(0.9, ge=0)
    """Largest lower bound. Below 1."""
    low_step: float = Field(0.02, gt=0)
    """Step by which the lower bound rises. Above 0."""
    high_start: float = Field(1.2, gt=0)
    """Upper bound at which the search starts. Above 1."""
    high_stop: float = Field(3.0, gt=0)
    """Largest upper bound."""
    high_step: float = Field(0.05, gt=0)
    """Step by which the upper bound rises. Above 0."""
    measure: Literal["value", "gradient"] = "gradient"
    """How the share is measured. "value": on clipped values, as published; "gradient": on tokens that still
    carry gradient, because the argument for raising the lower bound is about gradients."""
    order: Literal["paper", "code"] = "paper"
    """Bound that is raised first. "paper": the upper one; "code": the lower one, as in the released
    program."""
    weight: Literal["one", "behaviour_probability"] = "one"
    """Weight of a token in the share. "one": 1; "behaviour_probability": its probability under the behaviour
    policy, as published."""
    dual: float = Field(0.0, ge=0)
    """Dual clip: largest ratio that counts where the advantage is negative. 0: no dual clip; else above
    `high_stop`."""
    centre: Centre = "behaviour"
    """Policy in the denominator of the ratio."""

    def contradictions(self, field: str) -> Iterator[str]:
        a, b, c, d = self.low_start, self.low_stop, self.high_start, self.high_stop
        if not a <= b < 1 < c <= d:
            yield (
                f"{field}: low {a:g} to {b:g}, high {c:g} to {d:g}: bounds of the ratio must be "
                "low_start <= low_stop < 1 < high_start <= high_stop"
            )
        yield from _dual(field, self.dual, above=d)


class EntropySurrogate(Section):
    """Clip of the ratio current / proximal whose bounds, and advantages, depend on the token's entropy (HAPO,
    arXiv:2509.16591)."""

    kind: Literal["entropy"] = "entropy"
    low: LowHalfWidth = 0.2
    """Smallest distance of the lower bound from 1; the most certain token has twice as much. 0 to 1."""
    high: HalfWidth = 0.28
    """Smallest distance of the upper bound from 1; the most uncertain token has twice as much. At least 0."""
    quantile: float = Field(0.8, gt=0, lt=1)
    """Quantile of the entropy over the batch's tokens; tokens above it are uncertain. Above 0, below 1."""
    redistribute: bool = True
    """Scale advantages too: up for uncertain tokens whose ratio has moved, down for certain tokens whose
    ratio has not."""
    dual: float = Field(10.0, ge=0)
    """Dual clip: largest ratio that counts where the advantage is negative. 0: no dual clip; else above
    1 + 2 * high."""

    def contradictions(self, field: str) -> Iterator[str]:
        # The most uncertain token has the widest clip, with this upper bound.
        yield from _dual(field, self.dual, above=1 + 2 * self.high)


class LagSurrogate(Section):
    """Clip of the ratio current / proximal to a range that contracts with the token's policy lag; plain PPO
    at lag 0."""

    kind: Literal["lag"] = "lag"
    low: LowHalfWidth = 0.2
    """Distance of the lower bound from 1 at lag 0. 0 to 1."""
    high: HalfWidth = 0.28
    """Distance of the upper bound from 1 at lag 0. At least 0."""
    contraction: float = Field(0.25, ge=0)
    """Contraction per version: both distances are divided by 1 + contraction * lag. At least 0."""
    dual: float = Field(0.0, ge=0)
    """Dual clip: largest ratio that counts where the advantage is negative. 0: no dual clip; else above
    1 + high."""

    def contradictions(self, field: str) -> Iterator[str]:
        yield from _dual(field, self.dual, above=1 + self.high)


class WindowSurrogate(Section):
    """Clip of the ratio current / behaviour to an interval around the ratio proximal / behaviour (Mix-PPG of
    ReMix, arXiv:2507.06892)."""

    kind: Literal["window"] = "window"
    epsilon: float = Field(0.2, gt=0)
    """Distance of both bounds from the centre of the interval. Above 0."""
    centre_ceiling: float = Field(0.0, ge=0)
    """Largest weight of a token: where the ratio proximal / behaviour, which is the weight, is larger, the
    objective is scaled down to this. 0: no ceiling, as published."""


class RatioVarianceSurrogate(Section):
    """Penalty on the squared distance of the ratio current / centre from 1; its factor is a dual variable
    (R2VPO, arXiv:2601.03320)."""

    kind: Literal["ratio_variance"] = "ratio_variance"
    bound: float = Field(0.05, gt=0)
    """Bound of the mean of (ratio - 1)²: above it the dual variable rises, below it falls. Above 0."""
    dual_start: float = Field(1.0, ge=0)
    """Dual variable at the first step. At least 0."""
    dual_rate: float = Field(0.5, ge=0)
    """Change of the dual variable per optimizer step, for each unit by which the mean of (ratio - 1)² exceeds
    the bound. At least 0."""
    dual_ceiling: float = Field(10.0, gt=0)
    """Largest dual variable. Without a ceiling one token with a huge ratio would keep it large for the rest
    of the run. Above 0."""
    centre: Centre = "behaviour"
    """Policy in the denominator of the ratio."""


class BoundedSurrogate(Section):
    """Penalty on the distance of the ratio current / centre from a target: the upper bound for trajectories
    better than their group's median, else the lower bound (BPO and GBPO, arXiv:2604.18578)."""

    kind: Literal["bounded"] = "bounded"
    low: LowHalfWidth = 0.3
    """Distance of the lower bound from 1. 0 to 1."""
    high: HalfWidth = 0.3
    """Distance of the upper bound from 1. At least 0."""
    temperature: float = Field(1e-4, gt=0)
    """Softness of the change from one bound to the other around the median, in units of the advantage.
    Above 0."""
    centre: Centre = "proximal"
    """Policy in the denominator of the ratio."""


class MirrorDescentSurrogate(Section):
    """Ratio times advantage, minus KL(current || proximal) divided by a step size that falls during the run
    (MDPO, arXiv:2005.09814). It needs several optimizer steps per batch, because the KL has no gradient in
    the first."""

    kind: Literal["mirror_descent"] = "mirror_descent"


class RegressionSurrogate(Section):
    """Squared distance of a turn's log-ratio current / behaviour from the turn's advantage over beta (DAPO of direct
    advantages, arXiv:2412.18279). The advantages of a turn's tokens are added up, so they must be of kind "gae"."""

    kind: Literal["regression"] = "regression"
    beta: float = Field(1.0, gt=0)
    """Divisor of the advantage: the log-ratio at which a turn rests is advantage / beta. Above 0."""


class TrustRegionSurrogate(Section):
    """Ratio current / behaviour times advantage; a token is masked where its distance from the behaviour policy is
    above a bound and its gradient would make it larger (DPPO, arXiv:2602.04879)."""

    kind: Literal["trust_region"] = "trust_region"
    statistic: Statistic = "binary_tv"
    """Measure of a token. "ratio": |r - 1|, r = current / behaviour; "log_square": (log r)²; "binary_tv": |pi - mu|;
    "binary_kl": KL of the two-point distributions "this token" and "another"."""
    bound: float = Field(0.2, ge=0)
    """Largest distance at which a token may still move away. DPPO: 0.2 with "binary_tv", 0.05 with "binary_kl". At
    least 0."""


class SecondMomentSurrogate(Section):
    """Ratio current / behaviour times advantage, bounded at each optimizer step so that the mean of (log ratio)² over
    the tokens that move away from the behaviour policy stays within a budget (M2PO, arXiv:2510.01161). It costs a
    forward pass for each optimizer step."""

    kind: Literal["second_moment"] = "second_moment"
    budget: float = Field(0.04, gt=0)
    """Largest mean of (log ratio)², in nats². Above 0."""
    form: Literal["mask", "clip"] = "mask"
    """What bounds it. "mask": the tokens with the largest distance get no gradient, as published; "clip": all |log
    ratio| are capped where the mean is the budget, as in the released program, by a clip of at least `low` and
    `high`."""
    low: LowHalfWidth = 0.3
    """Form "clip": least distance of the lower bound from 1. 0 to 1."""
    high: HalfWidth = 0.5
    """Form "clip": least distance of the upper bound from 1. At least 0."""


class TailSurrogate(Section):
    """Clip of the ratio current / behaviour whose bound is contracted for the tokens with the largest |log ratio| of
    the optimizer step, on the side to which they have moved (SAT, arXiv:2607.18722). It costs a forward pass for each
    optimizer step."""

    kind: Literal["tail"] = "tail"
    low: LowHalfWidth = 0.2
    """Distance of the lower bound from 1. 0 to 1."""
    high: HalfWidth = 0.2
    """Distance of the upper bound from 1. At least 0."""
    quantile: float = Field(0.9, gt=0, lt=1)
    """Quantile of |log ratio| over the step's tokens above which a bound is contracted. Above 0, below 1."""
    power: float = Field(2.0, gt=0)
    """Power of the kernel 1 / (1 + (|log ratio| / quantile's value) ^ power). Above 0."""


class QuadraticPullSurrogate(Section):
    """Ratio current / behaviour times advantage, less the square of the shift of probability, weighted by the size of
    the advantage (DRPO, arXiv:2606.09821)."""

    kind: Literal["quadratic_pull"] = "quadratic_pull"
    bound: float = Field(0.2, gt=0)
    """Shift of a token's probability at which the gradient is 0; beyond it the token is pulled back. Above 0."""


class GammaSurrogate(Section):
    """REINFORCE weighted by a gamma-shaped kernel of the product of the ratios current / behaviour over the trajectory:
    W^power exp(rate (1 - W)), of its own for each sign of the advantage (VESPO, arXiv:2602.10693)."""

    kind: Literal["gamma"] = "gamma"
    positive_power: float = Field(2.0, ge=0)
    """Power where the advantage is at least 0. At least 0."""
    positive_rate: float = Field(3.0, ge=0)
    """Rate where the advantage is at least 0. At least 0."""
    negative_power: float = Field(3.0, ge=0)
    """Power where the advantage is negative. At least 0."""
    negative_rate: float = Field(2.0, ge=0)
    """Rate where the advantage is negative. At least 0."""


class TrajectoryBalanceSurrogate(Section):
    """Squared residual of trajectory balance, with the mean of the rollout group for log Z (TBA, arXiv:2503.18929). It
    needs no ratio to the behaviour policy, and a reference model: a copy and a forward pass; with several optimizer
    steps per batch one forward pass more."""

    kind: Literal["trajectory_balance"] = "trajectory_balance"
    beta: float = Field(0.014, gt=0)
    """Temperature: an answer rests where its log-probability is above the reference model's by return / beta, up to a
    number that its group shares. Above 0."""


class ShapedSurrogate(Section):
    """The advantage times p / (p + shaping), without a ratio: for tokens whose behaviour probability nobody knows, or
    whose ratio would be far from 1 (AMPO, arXiv:2510.02227; ICPO, arXiv:2510.26519). The gradient is largest where the
    policy gives a token the probability `shaping`, and small for tokens that it holds to be impossible."""

    kind: Literal["shaped"] = "shaped"
    shaping: float = Field(0.1, gt=0, lt=1)
    """lambda of the papers. Above 0, below 1."""


ShippedSurrogate = Annotated[
    ClipSurrogate
    | WeightedSurrogate
    | MiniRlSurrogate
    | TripletSurrogate
    | ChunkSurrogate
    | BalancedSurrogate
    | EntropySurrogate
    | LagSurrogate
    | WindowSurrogate
    | RatioVarianceSurrogate
    | BoundedSurrogate
    | MirrorDescentSurrogate
    | RegressionSurrogate
    | TrustRegionSurrogate
    | SecondMomentSurrogate
    | TailSurrogate
    | QuadraticPullSurrogate
    | GammaSurrogate
    | TrajectoryBalanceSurrogate
    | ShapedSurrogate,
    Field(discriminator="kind"),
]
SurrogateConfig = Annotated[
    Annotated[ShippedSurrogate, Tag(SHIPPED)] | Annotated[OwnSurrogate, Tag(OWN)], Discriminator(form_of)
]


ITSELF = (
    MiniRlSurrogate,
    RegressionSurrogate,
    TripletSurrogate,
    WindowSurrogate,
    TrustRegionSurrogate,
    SecondMomentSurrogate,
    TailSurrogate,
    QuadraticPullSurrogate,
    GammaSurrogate,
)
"""Surrogates whose ratio is current / behaviour, without a choice of the centre."""


def has_own_ratio(surrogate: Any) -> bool:
    """Return whether the ratio of a surrogate, as given in a run file, is current / behaviour."""
    given = surrogate if isinstance(surrogate, dict) else dict(surrogate)
    forms = {form.model_fields["kind"].default: form for form in get_args(get_args(ShippedSurrogate)[0])}
    form = forms.get(given.get("kind"))
    if form in (*ITSELF, TrajectoryBalanceSurrogate):
        return True
    if form is None or "centre" not in form.model_fields:
        return False
    centre: str = given.get("centre") or form.model_fields["centre"].default
    return centre == "behaviour"


def has_void_bounds(surrogate: SurrogateConfig) -> bool:
    """Return whether the surrogate does nothing but bound the ratio current / proximal."""
    match surrogate:
        case EntropySurrogate() | LagSurrogate() | MiniRlSurrogate() | ChunkSurrogate():
            return True
        case ClipSurrogate(centre=centre):
            return centre == "proximal"
        case WeightedSurrogate(centre=centre, low=low, high=high):
            # A weight between equal bounds is a number, and no bound of a ratio.
            return centre == "proximal" and low != high
        case _:
            return False
