"""`[learner.algorithm.surrogate]`: what is maximised, from the ratio of current to older probabilities.

Each form has its own fields and defaults; docs/recipes says which method each belongs to.
"""

from typing import Annotated, Literal

from pydantic import Field

from learner.algorithms.levels import Level
from protocol.section import Section

Centre = Literal["proximal", "behaviour"]
LowHalfWidth = Annotated[float, Field(ge=0, le=1)]
HalfWidth = Annotated[float, Field(ge=0)]


class ClipSurrogate(Section):
    """PPO clip of the ratio current / centre to [1 - low, 1 + high] (arXiv:1707.06347)."""

    kind: Literal["clip"] = "clip"
    low: LowHalfWidth = 0.2
    high: HalfWidth = 0.28
    dual: float = Field(0.0, ge=0)
    """Dual clip: for negative advantages the ratio counts at most so much; 0: off. Larger than 1 + high."""
    level: Level = "token"
    """"sequence": geometric mean over the trajectory (GSPO, arXiv:2507.18071); "turn": over each turn."""
    centre: Centre = "proximal"


class WeightedSurrogate(Section):
    """REINFORCE with the detached ratio current / centre, bounded to [low, high], as weight (CISPO,
    arXiv:2506.13585; AIPO, arXiv:2505.24034). No token loses its gradient."""

    kind: Literal["weighted"] = "weighted"
    low: float = Field(0.0, ge=0)
    high: float = Field(2.0, gt=0)
    centre: Centre = "behaviour"


class MiniRlSurrogate(Section):
    """Mask by current / proximal, weight min(ceiling, current / behaviour) (MiniRL, arXiv:2512.01374)."""

    kind: Literal["minirl"] = "minirl"
    low: LowHalfWidth = 0.2
    high: HalfWidth = 0.27
    ceiling: float = Field(5.0, gt=0)


class TripletSurrogate(Section):
    """Asymmetric clip of current / behaviour with three bounds (HisPO, arXiv:2603.21065). Its two-level mask
    is two corrections of kind "interval"."""

    kind: Literal["triplet"] = "triplet"
    negative_low: float = Field(0.8, ge=0)
    negative_high: float = Field(5.0, gt=0)
    positive_high: float = Field(1.28, gt=0)


class ChunkSurrogate(Section):
    """Weighted imitation where the advantage is positive, ratio of the whole turn bounded by 1 where it is
    negative (IPA, arXiv:2512.24873)."""

    kind: Literal["chunk"] = "chunk"


class BalancedSurrogate(Section):
    """Clip bounds moved at each update until positive advantages hold a given share (BAPO, arXiv:2510.18927)."""

    kind: Literal["balanced"] = "balanced"
    target: float = Field(0.4, ge=0, le=1)
    """Least share of the tokens with positive advantage in the surrogate."""
    low_start: float = Field(0.6, ge=0)
    low_stop: float = Field(0.9, ge=0)
    low_step: float = Field(0.02, gt=0)
    high_start: float = Field(1.2, gt=0)
    high_stop: float = Field(3.0, gt=0)
    high_step: float = Field(0.05, gt=0)
    measure: Literal["value", "gradient"] = "gradient"
    """"value": clipped values, as published; "gradient": only tokens that still carry gradient, which is what
    the argument for moving the lower bound needs."""
    order: Literal["paper", "code"] = "paper"
    """"paper" raises the upper bound first, "code" the lower one, as the released program does."""
    weight: Literal["one", "behaviour_probability"] = "one"
    dual: float = Field(0.0, ge=0)
    centre: Centre = "behaviour"


class EntropySurrogate(Section):
    """Clip bounds and advantages by the token's entropy (HAPO, arXiv:2509.16591)."""

    kind: Literal["entropy"] = "entropy"
    low: LowHalfWidth = 0.2
    high: HalfWidth = 0.28
    quantile: float = Field(0.8, gt=0, lt=1)
    """Of the log entropy over the batch; tokens above it count as uncertain."""
    redistribute: bool = True
    dual: float = Field(10.0, ge=0)


class LagSurrogate(Section):
    """Clip range that contracts with the token's policy lag; plain PPO at lag 0."""

    kind: Literal["lag"] = "lag"
    low: LowHalfWidth = 0.2
    high: HalfWidth = 0.28
    contraction: float = Field(0.25, ge=0)
    """Half widths are divided by 1 + contraction * lag."""
    dual: float = Field(0.0, ge=0)


class WindowSurrogate(Section):
    """Clip of current / behaviour to an interval around proximal / behaviour (Mix-PPG of ReMix,
    arXiv:2507.06892)."""

    kind: Literal["window"] = "window"
    epsilon: float = Field(0.2, gt=0)
    centre_ceiling: float = Field(0.0, ge=0)
    """Ceiling of proximal / behaviour, the centre, which is also the weight of a token; 0: none, as
    published."""


class RatioVarianceSurrogate(Section):
    """Penalty on the squared distance of current / behaviour from 1, its factor a dual variable (R2VPO,
    arXiv:2601.03320)."""

    kind: Literal["ratio_variance"] = "ratio_variance"
    bound: float = Field(0.05, gt=0)
    """Of the mean of (ratio - 1)²."""
    dual_start: float = Field(1.0, ge=0)
    dual_rate: float = Field(0.5, ge=0)
    """Step of the dual variable per optimizer step."""
    dual_ceiling: float = Field(10.0, gt=0)
    """One token with a huge ratio would otherwise raise it for the rest of the run."""
    centre: Centre = "behaviour"


class BoundedSurrogate(Section):
    """Distance of the ratio to a target at one of two bounds (BPO and GBPO, arXiv:2604.18578)."""

    kind: Literal["bounded"] = "bounded"
    low: LowHalfWidth = 0.3
    high: HalfWidth = 0.3
    temperature: float = Field(1e-4, gt=0)
    centre: Centre = "proximal"


class MirrorDescentSurrogate(Section):
    """Ratio times advantage minus KL(current || proximal) over a step size that falls (MDPO,
    arXiv:2005.09814). Needs several updates per batch: the first has no KL gradient."""

    kind: Literal["mirror_descent"] = "mirror_descent"


SurrogateConfig = Annotated[
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
    | MirrorDescentSurrogate,
    Field(discriminator="kind"),
]
