"""`[learner.algorithm]`: the objective, put together from parts. docs/recipes says which parts make which method.

A part with several forms is a table with a `kind`; every form has its own fields and defaults.
"""

from typing import Annotated, Literal

from pydantic import Field

from learner.algorithms.levels import Level
from learner.surrogate_config import ClipSurrogate, SurrogateConfig
from protocol.section import Section

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
GROUP_RELATIVE = ("group", "leave_one_out", "token_group")
"""Kinds that form an advantage for a whole trajectory by comparison with the group's other members."""


# --- correction: weight of a token from the ratio proximal / behaviour -------------------------------------


CorrectionLevel = Level | Literal["group"]


class TruncatedCorrection(Section):
    """Weight min(ceiling, proximal / behaviour), detached (truncated importance sampling)."""

    kind: Literal["truncated"] = "truncated"
    ceiling: float = Field(2.0, gt=0)
    level: CorrectionLevel = "token"
    """Above "token": the geometric mean over the turn, the trajectory, or all answers of a rollout group, which leaves
    group-relative advantages balanced."""


class IntervalCorrection(Section):
    """Tokens whose ratio proximal / behaviour is outside [low, high] get no gradient (IcePop); at level
    "sequence" whole trajectories are rejected by their geometric mean, at "group" whole rollout groups."""

    kind: Literal["interval"] = "interval"
    low: float = Field(0.5, ge=0)
    high: float = Field(2.0, gt=0)
    level: CorrectionLevel = "token"
    weight: bool = True
    """Inside the interval: the ratio itself as weight, or 1."""


CorrectionConfig = Annotated[TruncatedCorrection | IntervalCorrection, Field(discriminator="kind")]


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
