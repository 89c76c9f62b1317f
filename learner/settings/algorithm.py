"""`[learner.algorithm]`: the objective, composed of parts. docs/recipes says which parts make which method.

A part with several forms is a table with a `kind`; every form has its own fields and defaults.
"""

from typing import Literal

from pydantic import Field

from learner.settings.advantages import AdvantageConfig, GroupAdvantage
from learner.settings.corrections import CorrectionConfig, TruncatedCorrection
from learner.settings.critic import CriticConfig
from learner.settings.regularisers import CovarianceMask, EntropyBonus, KlConfig
from learner.settings.surrogates import ClipSurrogate, SurrogateConfig
from protocol.section import Section


class FixedAggregation(Section):
    """The losses of a trajectory's tokens are summed and divided by one constant (Dr. GRPO,
    arXiv:2503.20783)."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1)
    """The constant, in tokens; Dr. GRPO takes the most tokens that a response may have. At least 1. Absent:
    learner.sampling.max_trajectory_tokens."""


AggregationConfig = Literal["token_mean", "sequence_mean"] | FixedAggregation


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
    routes: Literal["current", "proximal", "behaviour"] = "current"
    """Experts of a mixture of experts with which the policy is trained. "current": those that its routers choose
    now. "proximal": those that the learner's weights before the update choose, in all optimizer steps on a batch,
    weighed anew (routing replay R2, arXiv:2512.01374). It acts with several steps only. "behaviour": those that the
    generator chose when it sampled, in all passes, of frozen policies, too (R3 of the same paper, arXiv:2510.11370)."""
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
