"""`[learner.algorithm]`: the objective, composed of parts. docs/recipes says which parts make which method.

A part with several forms is a table with a `kind`; every form has its own fields and defaults.
"""

from typing import Annotated, Literal

from pydantic import Field

from learner.algorithms.levels import Level
from learner.credit.comparison_config import ComparedAdvantage
from learner.surrogate_config import ClipSurrogate, SurrogateConfig
from protocol.section import Section

# --- advantage --------------------------------------------------------------------------------------------


class GroupAdvantage(Section):
    """Return minus the mean return of the rollout group (GRPO, arXiv:2402.03300)."""

    kind: Literal["group"] = "group"
    scale: Literal["std", "sample_std", "none"] = "std"
    """Divisor of the difference. "std": the group's standard deviation, with divisor G, the number of
    members; "sample_std": the standard deviation with divisor G - 1; "none": 1, the Dr. GRPO form
    (arXiv:2503.20783)."""


class LeaveOneOutAdvantage(Section):
    """Return minus the mean return of the group's other members (RLOO, arXiv:2402.14740; LOOP,
    arXiv:2502.01600)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class TokenGroupAdvantage(Section):
    """Return minus the group mean, over the group's standard deviation, both taken over tokens, so that long
    responses count more (HAPO, arXiv:2509.16591)."""

    kind: Literal["token_group"] = "token_group"
    ceiling: float = Field(5.0, gt=0)
    """A group with an absolute advantage of at least this falls back to mean and deviation over
    trajectories. Above 0."""


class BatchMeanAdvantage(Section):
    """Return minus the mean return of the whole batch (REINFORCE with a batch baseline)."""

    kind: Literal["batch_mean"] = "batch_mean"
    scale: Literal["std", "none"] = "std"
    """Divisor of the difference. "std": the standard deviation of the batch's returns; "none": 1."""


class GreedyAdvantage(Section):
    """Return minus the return of the greedy response to the same task (ReMax, arXiv:2310.10505). It needs one
    more trajectory per task."""

    kind: Literal["greedy"] = "greedy"


class TurnReturnAdvantage(Section):
    """Discounted return from each turn on; all tokens of a turn have the same advantage (IPA,
    arXiv:2512.24873)."""

    kind: Literal["turn_return"] = "turn_return"
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per turn. Above 0, at most 1."""
    baseline: Literal["none", "group"] = "group"
    """Baseline that is subtracted. "group": the group's mean at the same turn; "none": nothing."""


class RiskAdvantage(Section):
    """Risk measure of bundles of tasks, which counts their lower tail more and their upper tail not at all (RiskPO,
    arXiv:2510.00911). A bundle's j-th paper has the j-th answer of each of its groups. The running quantiles of the
    papers' sums are a part of the checkpoint."""

    kind: Literal["risk"] = "risk"
    bundle: int = Field(5, ge=1)
    """Rollout groups in a bundle, in the order of the batch. At least 1; a batch holds a multiple of it."""
    levels: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0, le=1)]] = Field(
        (0.2, 0.8), strict=False
    )
    """Levels of the lower and the upper quantile. The first is below the second."""
    mix: float = Field(1.5, ge=0)
    """Weight of the lower tail beside the range between the quantiles, whose weight is 1. At least 0."""
    rate: float = Field(0.1, gt=0)
    """Step of a running quantile, in units of the return, if all papers of a batch are on one side. Above 0."""
    natural_baseline: bool = False
    """Subtract the distance of the quantiles, so that no paper has a positive advantage."""


class GaeAdvantage(Section):
    """Generalised advantage estimation over tokens (arXiv:1506.02438); needs `[learner.algorithm.critic]`.

    Unfinished trajectories use T-PPO's extended form (arXiv:2506.15050).
    """

    kind: Literal["gae"] = "gae"
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per token. Above 0, at most 1."""
    trace: float = Field(0.95, ge=0, le=1)
    """Lambda of the estimate; with `adaptive_alpha` the smallest lambda. 0 to 1."""
    adaptive_alpha: float = Field(0.0, ge=0)
    """Alpha of the length-adaptive lambda = max(trace, 1 - 1 / (alpha * length)). 0: lambda is `trace`. T-PPO
    uses 0.05. At least 0."""
    ignored_tail: int = Field(8, ge=0)
    """Number of last tokens of an unfinished window that carry no policy gradient, because their advantages
    are the most biased. At least 0."""
    whiten: bool = True
    """Shift and scale the advantages of the batch's trained tokens to mean 0 and variance 1."""
    ceiling: float = Field(10.0, gt=0)
    """Bound of the absolute advantage; larger ones are clipped to it. Above 0."""


AdvantageConfig = Annotated[
    GroupAdvantage
    | LeaveOneOutAdvantage
    | TokenGroupAdvantage
    | BatchMeanAdvantage
    | GreedyAdvantage
    | TurnReturnAdvantage
    | ComparedAdvantage
    | RiskAdvantage
    | GaeAdvantage,
    Field(discriminator="kind"),
]
GROUP_RELATIVE = ("group", "leave_one_out", "token_group")
"""Kinds of advantage that compare a whole trajectory with the other members of its group."""


# --- correction: weight of a token from the ratio proximal / behaviour -------------------------------------


CorrectionLevel = Level | Literal["product", "group"]


class TruncatedCorrection(Section):
    """Weight min(ceiling, proximal / behaviour), without gradient (truncated importance sampling)."""

    kind: Literal["truncated"] = "truncated"
    ceiling: float = Field(2.0, gt=0)
    """Largest weight. Above 0."""
    level: CorrectionLevel = "token"
    """Tokens that share one ratio. "token": each has its own; else the geometric mean over the tokens of
    "turn": the turn, "sequence": the trajectory, "group": all trajectories of the rollout group, which keeps
    the sum of group-relative advantages at zero. "product": the product over the trajectory's tokens, without
    bias but with a variance that grows with the length."""


class IntervalCorrection(Section):
    """Tokens whose ratio proximal / behaviour is outside [low, high] get no gradient (IcePop). At level
    "sequence" or "group" the geometric mean decides for the whole trajectory or rollout group; at level
    "product" the product decides for the trajectory."""

    kind: Literal["interval"] = "interval"
    low: float = Field(0.5, ge=0)
    """Smallest ratio that is kept. At least 0, below `high`."""
    high: float = Field(2.0, gt=0)
    """Largest ratio that is kept. Above 0."""
    level: CorrectionLevel = "token"
    """Tokens that share one ratio: see `level` of kind "truncated"."""
    weight: bool = True
    """Weight of a token inside the interval. True: the ratio itself; false: 1."""


CorrectionConfig = Annotated[TruncatedCorrection | IntervalCorrection, Field(discriminator="kind")]


# --- regularisers -------------------------------------------------------------------------------------------


class KlPenalty(Section):
    """Penalty on KL(current || other policy), estimated per token."""

    kind: Literal["penalty"] = "penalty"
    coefficient: float = Field(0.001, gt=0)
    """Factor of the penalty in the loss. Above 0."""
    to: Literal["proximal", "reference"] = "reference"
    """The other policy. "reference": the model that training began with, which costs memory for a copy and a
    forward pass; "proximal": the proximal policy, which needs several optimizer steps per batch to act."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL, with d = log other - log current. "k1": -d, whose gradient is zero on average, so
    it regularises nothing; "k2": d^2 / 2, whose gradient is that of the KL; "k3": exp(d) - 1 - d, the one of
    GRPO, cut at 10: a token with d above 2.61 is not pulled back, so use "k2" where the policy may go far."""


class KlConvex(Section):
    """Penalty on a convex mixture of the KL to the base policy and the KL to the predecessor, the policy
    before the last update. The share of the base policy falls during training (ReMix, arXiv:2507.06892). It
    costs two copies of the model."""

    kind: Literal["convex"] = "convex"
    coefficient: float = Field(0.001, gt=0)
    """Factor of the penalty in the loss. Above 0."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of both KLs: see `estimator` of kind "penalty"."""
    hold: int = Field(50, ge=0)
    """Learner steps in which the share of the base policy is 1. At least 0."""
    every: int = Field(10, ge=1)
    """Learner steps between two drops of that share. At least 1."""
    drop: float = Field(0.1, ge=0, le=1)
    """Amount by which the share falls at each drop. 0 to 1."""
    floor: float = Field(0.5, ge=0, le=1)
    """Smallest share of the base policy. 0 to 1."""


KlConfig = Annotated[KlPenalty | KlConvex, Field(discriminator="kind")]


class EntropyBand(Section):
    """A band around the mean entropy of all earlier updates; the bonus is reduced by a penalty on tokens outside it
    (EPO, arXiv:2509.22576). It acts from the second update on, with the coefficient of the bonus."""

    low: float = Field(0.8, ge=0, le=1)
    """Lower edge of the band, as a share of the mean. 0: none. 0 to 1."""
    high: float = Field(1.2, ge=1)
    """Upper edge of the band, as a share of the mean. At least 1."""
    coefficient: float = Field(0.1, gt=0)
    """Factor of the distance from the band, in nats. Above 0."""
    growth: float = Field(1.0, ge=0)
    """The penalty's weight falls from 2 to 1 + exp(-2 growth) over the run. At least 0."""


class EntropyBonus(Section):
    """Entropy bonus in the loss; its coefficient is fixed, or steered towards a target entropy
    (arXiv:2505.22312)."""

    coefficient: float = Field(0.0, ge=0)
    """Factor of the entropy at the first step. At least 0; 0 without a `target`: no bonus."""
    target: float = Field(0.0, ge=0)
    """Mean entropy per token, in nats, that the coefficient is steered to: it rises while the entropy is
    below the target, else it falls. 0: the coefficient is fixed."""
    change: float = Field(1e-4, gt=0)
    """Amount by which the coefficient rises or falls per learner step. Above 0."""
    maximum: float = Field(0.02, gt=0)
    """Largest coefficient when it is steered. Above 0."""
    band: EntropyBand | None = None
    """Band that the entropy is held in. Absent: none."""


# --- aggregation --------------------------------------------------------------------------------------------


class FixedAggregation(Section):
    """The losses of a trajectory's tokens are summed and divided by one constant (Dr. GRPO,
    arXiv:2503.20783)."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1)
    """The constant, in tokens; Dr. GRPO takes the most tokens that a response may have. At least 1. Absent:
    learner.sampling.max_trajectory_tokens."""


AggregationConfig = Literal["token_mean", "sequence_mean"] | FixedAggregation


# --- critic -------------------------------------------------------------------------------------------------


class CriticConfig(Section):
    """`[learner.algorithm.critic]`: the critic, which estimates the value of every action token and learns
    from returns."""

    model: Literal["head", "separate"] = "head"
    """Form of the critic. "head": a second head on the policy; "separate": a model with its own optimizer."""
    coefficient: float = Field(0.5, gt=0)
    """Factor of the value loss in the policy's loss. It has an effect with model = "head" only. Above 0."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the separate critic, or of the value head. Above 0."""
    target: Literal["monte_carlo", "lambda", "vtrace"] = "monte_carlo"
    """Targets of the values. "monte_carlo": returns of finished trajectories, on all of their
    action tokens (T-PPO); "lambda": lambda-returns (advantage plus value), on the tokens of the window;
    "vtrace": lambda-returns corrected for the behaviour policy (IMPALA, arXiv:1802.01561), on the tokens of
    the window."""
    clip_low: float = Field(0.5, ge=0)
    """How far below its earlier estimate a value may move in one update, in units of the return. The earlier
    estimate is from when the token was first trained. At least 0; 0 here and in `clip_high`: no clip."""
    clip_high: float = Field(0.6, ge=0)
    """How far above its earlier estimate a value may move in one update, in units of the return. At least 0.
    """
    warmup_steps: int = Field(0, ge=0)
    """Learner steps at the start that train the critic only. At least 0."""


class Reincarnation(Section):
    """A change of the objective at a learner step. The current policy becomes the reference policy, replay
    ends, and the settings below replace `[learner.algorithm]` (ReMix, arXiv:2507.06892)."""

    step: int = Field(50, ge=1)
    """Learner step at which the objective changes. At least 1; with replay equal to
    `learner.replay.stop_at_step`."""
    surrogate: SurrogateConfig = ClipSurrogate()
    """Surrogate from that step on."""
    corrections: tuple[CorrectionConfig, ...] = Field((TruncatedCorrection(),), strict=False)
    """Corrections from that step on."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps on one batch and pass from then on. At least 1."""
    passes: int = Field(1, ge=1)
    """How often each trajectory of a batch is trained on from then on. At least 1."""


class CovarianceMask(Section):
    """Some tokens whose probability and advantage go together get no gradient, because they lower the entropy most
    (SPEAR, arXiv:2509.22601). The covariance is (A - mean A)(log pi - mean log pi) over the batch's trained tokens."""

    low: float = 1.0
    """Covariance above which a token may be left out."""
    high: float = 40.0
    """Covariance below which a token may be left out. Above `low`."""
    share: float = Field(0.02, gt=0, le=1)
    """Share of all tokens that is left out at most, drawn at random. Above 0, at most 1."""


class AlgorithmConfig(Section):
    """`[learner.algorithm]`: the objective, composed of parts."""

    advantage: AdvantageConfig = GroupAdvantage()
    """How much better than expected a trajectory, turn or token was."""
    proximal: Literal["recomputed", "interpolated", "behaviour"] = "recomputed"
    """Proximal policy. "recomputed": the learner's weights before the update. "interpolated": between
    behaviour policy and current policy, by policy lag, without a forward pass (A-3PO, arXiv:2512.06547).
    "behaviour": the behaviour policy itself."""
    corrections: tuple[CorrectionConfig, ...] = Field((TruncatedCorrection(),), strict=False)
    """Weights of a token from its ratio proximal / behaviour; all of them are multiplied. Empty: staleness is
    not corrected."""
    surrogate: SurrogateConfig = ClipSurrogate()
    """Objective of a token, from the ratio of current to older probability."""
    entropy: EntropyBonus = EntropyBonus()
    kl: KlConfig | None = None
    """Penalty on the KL divergence from other policies."""
    aggregation: AggregationConfig = "token_mean"
    """How token losses become one number. "token_mean": all tokens of the mini-batch have equal weight;
    "sequence_mean": all trajectories have equal weight; or the table of kind "fixed"."""
    updates_per_batch: int = Field(1, ge=1)
    """Mini-batches, one optimizer step each, into which the trajectories of a batch are dealt in each pass.
    At least 1."""
    passes: int = Field(1, ge=1)
    """How often each trajectory of a batch is trained on. At least 1."""
    routes: Literal["current", "proximal"] = "current"
    """Experts of a mixture of experts with which the policy is trained. "current": those that its routers choose
    now. "proximal": those that the learner's weights before the update choose, in all optimizer steps on a batch,
    weighed anew (routing replay R2, arXiv:2512.01374). It acts with several steps only."""
    lr_by_ess: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate of a step by the effective sample size of its proximal / behaviour weights, a
    share from 0 to 1 (VCPO, arXiv:2602.17616). "linear": by the share; "sqrt": by its square root."""
    scale_by_informative: bool = False
    """Multiply advantages by the number of groups over the number of groups with unequal returns, or with an advantage
    of kind "compared", of groups in which a term has a difference (RAPO, arXiv:2509.24107)."""
    covariance: CovarianceMask | None = None
    """Tokens that are left out because they lower the entropy most. It costs a forward pass. Absent: none."""
    advantage_by_entropy: float = Field(0.0, ge=0)
    """Multiply the advantage of a token by 1 + this times its entropy, which is shifted and scaled to mean 0 and
    deviation 1 over the batch's trained tokens (AEPO, arXiv:2510.14545, which takes 0.2). It costs a forward pass. 0:
    all tokens count alike."""
    shared_prefix: Literal["own", "mean", "sum"] = "own"
    """Advantage of tokens with which branches begin (`[learner.family]` of kind "branch"); they are trained once, in
    the trajectory that sampled them. "own": its advantage; "mean": the mean over all that share the token, the hard
    form of ARPO (arXiv:2507.19849); "sum": their sum, the soft form, which trains as if each had a copy."""
    imitation_coefficient: float = Field(0.0, ge=0)
    """Factor of the negative log-likelihood of trajectories that solved their task, which is added to the
    loss (T-PPO uses 0.1). 0: no imitation."""
    imitation_return: float = 1.0
    """Smallest return of a trajectory that is imitated, in environments that do not tell whether a task was
    solved. Where they tell (`StepResult.correct`), it has no effect."""
    critic: CriticConfig | None = None
    reincarnation: Reincarnation | None = None
