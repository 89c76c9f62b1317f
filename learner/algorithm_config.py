"""`[learner.algorithm]`: the objective, put together from parts. docs/recipes says which parts make which method.

A part with several forms is a table with a `kind`; every form has its own fields and defaults.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Level = Literal["token", "turn", "sequence"]
Centre = Literal["proximal", "behaviour"]
LowHalfWidth = Annotated[float, Field(ge=0, le=1)]
HalfWidth = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Strict: unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# --- advantage --------------------------------------------------------------------------------------------


class GroupAdvantage(Section):
    """Return against the mean of the rollout group (GRPO, arXiv:2402.03300)."""

    kind: Literal["group"] = "group"
    scale: Literal["std", "sample_std", "none"] = "std"
    """"std" divides by the group's standard deviation ("sample_std": by that with G - 1); "none" is the Dr.
    GRPO form (arXiv:2503.20783)."""


class LeaveOneOutAdvantage(Section):
    """Return against the mean of the group's other members (RLOO, arXiv:2402.14740; LOOP, arXiv:2502.01600)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class TokenGroupAdvantage(Section):
    """Group mean and deviation taken over tokens, long responses counting more (HAPO, arXiv:2509.16591)."""

    kind: Literal["token_group"] = "token_group"
    ceiling: float = Field(5.0, gt=0)
    """A group in which an advantage would reach this falls back to means over trajectories."""


class BatchMeanAdvantage(Section):
    """Return against the mean of the whole batch (REINFORCE with a batch baseline)."""

    kind: Literal["batch_mean"] = "batch_mean"
    scale: Literal["std", "none"] = "std"


class GreedyAdvantage(Section):
    """Return against that of the greedy response (ReMax, arXiv:2310.10505): one more trajectory per task."""

    kind: Literal["greedy"] = "greedy"


class TurnReturnAdvantage(Section):
    """Discounted return from each turn on, the same for all tokens of the turn (IPA, arXiv:2512.24873)."""

    kind: Literal["turn_return"] = "turn_return"
    discount: float = Field(1.0, gt=0, le=1)
    baseline: Literal["none", "group"] = "group"
    """"group": mean over the group's members at the same turn."""


class GaeAdvantage(Section):
    """Generalised advantage estimation over tokens (arXiv:1506.02438); needs `[learner.algorithm.critic]`.

    On unfinished trajectories it is T-PPO's extended form (arXiv:2506.15050).
    """

    kind: Literal["gae"] = "gae"
    discount: float = Field(1.0, gt=0, le=1)
    trace: float = Field(0.95, ge=0, le=1)
    """Lambda; with `adaptive_alpha` the smallest one."""
    adaptive_alpha: float = Field(0.0, ge=0)
    """Length-adaptive lambda = max(trace, 1 - 1 / (alpha * length)); 0: off. T-PPO uses 0.05."""
    ignored_tail: int = Field(8, ge=0)
    """Last tokens of an unfinished window without policy gradient; their advantages are the most biased."""
    whiten: bool = True
    """Scale advantages of the batch's trained tokens to mean 0 and variance 1."""
    ceiling: float = Field(10.0, gt=0)
    """Of the absolute advantage."""


AdvantageConfig = Annotated[
    GroupAdvantage
    | LeaveOneOutAdvantage
    | TokenGroupAdvantage
    | BatchMeanAdvantage
    | GreedyAdvantage
    | TurnReturnAdvantage
    | GaeAdvantage,
    Field(discriminator="kind"),
]


# --- correction: weight of a token from the ratio proximal / behaviour -------------------------------------


class TruncatedCorrection(Section):
    """Weight min(ceiling, proximal / behaviour), detached (truncated importance sampling)."""

    kind: Literal["truncated"] = "truncated"
    ceiling: float = Field(2.0, gt=0)
    level: Level = "token"


class IntervalCorrection(Section):
    """Tokens whose ratio proximal / behaviour is outside [low, high] get no gradient (IcePop); at level
    "sequence" whole trajectories are rejected by their geometric mean."""

    kind: Literal["interval"] = "interval"
    low: float = Field(0.5, ge=0)
    high: float = Field(2.0, gt=0)
    level: Level = "token"
    weight: bool = True
    """Inside the interval: the ratio itself as weight, or 1."""


CorrectionConfig = Annotated[TruncatedCorrection | IntervalCorrection, Field(discriminator="kind")]


# --- surrogate ----------------------------------------------------------------------------------------------


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


# --- regularisers -------------------------------------------------------------------------------------------


class KlPenalty(Section):
    """Penalty on KL(current || another policy), estimated per token."""

    kind: Literal["penalty"] = "penalty"
    coefficient: float = Field(0.001, gt=0)
    to: Literal["proximal", "reference"] = "reference"
    """"reference": the model that training began with; costs memory for a copy and a forward pass."""
    estimator: Literal["k1", "k2", "k3"] = "k3"


class KlConvex(Section):
    """Penalty on a convex mixture of the KL to the base policy and to the predecessor, the policy before the
    last update; the share of the base falls (ReMix, arXiv:2507.06892). Costs two copies of the model."""

    kind: Literal["convex"] = "convex"
    coefficient: float = Field(0.001, gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    hold: int = Field(50, ge=0)
    """Learner steps with the base alone."""
    every: int = Field(10, ge=1)
    """Steps between two drops."""
    drop: float = Field(0.1, ge=0, le=1)
    floor: float = Field(0.5, ge=0, le=1)


KlConfig = Annotated[KlPenalty | KlConvex, Field(discriminator="kind")]


class EntropyBonus(Section):
    """Coefficient of the entropy, fixed, or steered to a target (arXiv:2505.22312)."""

    coefficient: float = Field(0.0, ge=0)
    target: float = Field(0.0, ge=0)
    """Nats; 0: the coefficient stays as it is. Otherwise it is raised while the entropy is below."""
    change: float = Field(1e-4, gt=0)
    """Per learner step."""
    maximum: float = Field(0.02, gt=0)


# --- aggregation --------------------------------------------------------------------------------------------


class FixedAggregation(Section):
    """Every trajectory's tokens are summed and divided by one constant (Dr. GRPO, arXiv:2503.20783)."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1)


AggregationConfig = Literal["token_mean", "sequence_mean"] | FixedAggregation


# --- critic -------------------------------------------------------------------------------------------------


class CriticConfig(Section):
    """`[learner.algorithm.critic]`: a value of every token, learned from returns."""

    model: Literal["head", "separate"] = "head"
    """A second head on the policy, or a model of its own with its own optimizer."""
    coefficient: float = Field(0.5, gt=0)
    """Of the value loss; matters for "head" only."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of a separate critic, and of the head itself."""
    target: Literal["monte_carlo", "lambda", "vtrace"] = "monte_carlo"
    """"monte_carlo" trains on finished trajectories only, all of their tokens (T-PPO)."""
    clip_low: float = Field(0.5, ge=0)
    clip_high: float = Field(0.6, ge=0)
    """How far a value may move from what it was when its token was trained, per update; both 0: no clip."""
    warmup_steps: int = Field(0, ge=0)
    """First learner steps that train the critic only."""


class Reincarnation(Section):
    """From a learner step on: the base policy becomes the policy of that moment, replay ends, and the
    objective changes (ReMix, arXiv:2507.06892)."""

    step: int = Field(50, ge=1)
    surrogate: SurrogateConfig = ClipSurrogate()
    corrections: tuple[CorrectionConfig, ...] = Field((TruncatedCorrection(),), strict=False)
    updates_per_batch: int = Field(1, ge=1)


class AlgorithmConfig(Section):
    """`[learner.algorithm]`: the objective, put together from parts."""

    advantage: AdvantageConfig = GroupAdvantage()
    proximal: Literal["recomputed", "interpolated", "behaviour"] = "recomputed"
    """Proximal policy: the learner's weights before the update; between behaviour and current, by lag (no
    forward pass; A-3PO, arXiv:2512.06547); or the behaviour policy itself."""
    corrections: tuple[CorrectionConfig, ...] = Field((TruncatedCorrection(),), strict=False)
    """Weights from proximal / behaviour, multiplied; empty: the staleness of a token is ignored."""
    surrogate: SurrogateConfig = ClipSurrogate()
    entropy: EntropyBonus = EntropyBonus()
    kl: KlConfig | None = None
    aggregation: AggregationConfig = "token_mean"
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps on one batch: its trajectories are dealt to that many mini-batches, `passes` times."""
    passes: int = Field(1, ge=1)
    """How often each trajectory of a batch is trained on."""
    lr_by_ess: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by the effective sample size of the proximal / behaviour weights (0 to 1), or by
    its root (VCPO, arXiv:2602.17616)."""
    scale_by_informative: bool = False
    """Multiply advantages by the number of groups over those with unequal returns (RAPO, arXiv:2509.24107)."""
    imitation_coefficient: float = Field(0.0, ge=0)
    """Of the negative log-likelihood of finished trajectories with a return above 0 (T-PPO uses 0.1)."""
    critic: CriticConfig | None = None
    reincarnation: Reincarnation | None = None
