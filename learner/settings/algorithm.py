"""`[learner.algorithm]`: the objective, composed of an advantage, corrections, a surrogate, regularisers and a critic.

Each form has its own fields and defaults; docs/recipes says which method each belongs to.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from learner.settings.advantages import (
    GROUP_RELATIVE,
    AdvantageConfig,
    GroupAdvantage,
    judges_groups,
)
from learner.settings.corrections import CorrectionConfig, TruncatedCorrection
from learner.settings.distillation import Distillation
from learner.settings.origins import OriginLoss, unreachable
from learner.settings.siblings import SiblingDistillation
from learner.settings.surrogates import (
    ITSELF,
    BalancedSurrogate,
    BoundedSurrogate,
    ClipSurrogate,
    EntropySurrogate,
    MirrorDescentSurrogate,
    RatioVarianceSurrogate,
    RegressionSurrogate,
    SecondMomentSurrogate,
    SurrogateConfig,
    TailSurrogate,
    TrajectoryBalanceSurrogate,
    WeightedSurrogate,
    has_own_ratio,
    has_void_bounds,
)
from protocol.section import Section

OF_ALL_TOKENS = ("balanced", "entropy", "second_moment", "tail", "ratio_variance", "trajectory_balance")
"""Surrogates that take a number from all tokens of an optimizer step, or compare them with each other."""
UNTAUGHT = ("bounded", "regression", "trajectory_balance")
"""Surrogates that read more of the rewards than advantages of tokens, so that no teacher can speak through them."""


def _estimator(field: str, estimator: str) -> Iterator[str]:
    if estimator == "k1":
        yield (
            f'{field}.estimator is "k1": as a loss its gradient is zero on average, so it regularises nothing; use '
            '"k2" or "k3"'
        )


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

    def contradictions(self, field: str) -> Iterator[str]:
        yield from _estimator(field, self.estimator)


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

    def contradictions(self, field: str) -> Iterator[str]:
        yield from _estimator(field, self.estimator)


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

    def contradictions(self, field: str) -> Iterator[str]:
        if self.band is not None and not (self.coefficient or self.target):
            yield (
                f"{field}.band is set but entropy.coefficient is 0: the band has the factor of the bonus, so it would "
                "not act; raise coefficient, or take band out"
            )
        if self.target and self.coefficient > self.maximum:
            yield (
                f"{field}.coefficient {self.coefficient:g} is above its maximum {self.maximum:g}; raise maximum or "
                "lower the coefficient"
            )


class CovarianceMask(Section):
    """Some tokens whose probability and advantage go together get no gradient, because they lower the entropy most
    (SPEAR, arXiv:2509.22601). The covariance is (A - mean A)(log pi - mean log pi) over the batch's trained tokens."""

    low: float = 1.0
    """Covariance above which a token may be left out."""
    high: float = 40.0
    """Covariance below which a token may be left out. Above `low`."""
    share: float = Field(0.02, gt=0, le=1)
    """Share of all tokens that is left out at most, drawn at random. Above 0, at most 1."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.low >= self.high:
            yield f"{field}: low {self.low:g} is not below high {self.high:g}; lower low"


class CriticConfig(Section):
    """`[learner.algorithm.critic]`: the critic, which estimates the value of every action token and learns
    from returns."""

    model: Literal["head", "separate"] = "head"
    """Form of the critic. "head": a second head on the policy; "separate": a model with its own optimizer."""
    coefficient: float = Field(0.5, gt=0)
    """Factor of the value loss in the policy's loss. It has an effect with model = "head" only. Above 0."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the separate critic, or of the value head. Above 0."""
    target: Literal["monte_carlo", "lambda", "vtrace", "success"] = "monte_carlo"
    """Targets of the values. "monte_carlo": returns of finished trajectories, on all of their
    action tokens (T-PPO); "lambda": lambda-returns (advantage plus value), on the tokens of the window;
    "vtrace": lambda-returns corrected for the behaviour policy (IMPALA, arXiv:1802.01561), on the tokens of
    the window; "success": the share of right answers among the samples of the group that went on from the same tokens
    (arXiv:2412.18279). With "success" a value is a probability, its loss a cross-entropy, and the reward of a
    trajectory 1 if its answer is right, else 0, whatever other rewards it has."""
    clip_low: float = Field(0.5, ge=0)
    """How far below its earlier estimate a value may move in one update, in units of the return. The earlier
    estimate is from when the token was first trained. At least 0; 0 here and in `clip_high`: no clip."""
    clip_high: float = Field(0.6, ge=0)
    """How far above its earlier estimate a value may move in one update, in units of the return. At least 0.
    """
    warmup_steps: int = Field(0, ge=0)
    """Learner steps at the start that train the critic only. At least 0."""
    steps: int = Field(1, ge=1)
    """Optimizer steps of a separate critic for each one of the policy, on the same mini-batch (SAO, arXiv:2607.07508,
    takes 2). At least 1."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.steps > 1 and self.model == "head":
            yield (
                f'{field}.steps is {self.steps} but {field}.model is "head", which steps with the policy; use model = '
                '"separate"'
            )
        if self.target == "success" and (self.clip_low or self.clip_high):
            yield (
                f'{field}.target is "success" with {field}.clip_low {self.clip_low:g} and clip_high '
                f"{self.clip_high:g}, which bound a squared error: its loss is a cross-entropy; set both to 0"
            )


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


class ChangedObjective(NamedTuple):
    """The part of an objective that a reincarnation changes; `name` is the table of the run file."""

    name: str
    surrogate: SurrogateConfig
    corrections: tuple[CorrectionConfig, ...]
    updates_per_batch: int
    passes: int

    @property
    def steps(self) -> int:
        """Optimizer steps on one batch."""
        return self.updates_per_batch * self.passes


def not_together(what: str, field: str, others: Mapping[str, bool]) -> Iterator[str]:
    """Yield the refusal of a setting beside others.

    Args:
        field: prefix of the names of the others.
        others: by name, whether each is set.

    Example:
        >>> list(not_together("learner.given", "learner", {"replay": True, "family": False}))
        ['learner.given cannot be together with learner.replay; take one of them out']
    """
    for name in (name for name, present in others.items() if present):
        yield f"{what} cannot be together with {field}.{name}; take one of them out"


class AlgorithmConfig(Section):
    """`[learner.algorithm]`: the objective, composed of parts.

    Without a surrogate and corrections, and with a single step per batch, it is REINFORCE weighted by the ratio current
    / behaviour, at most 2 (CISPO): a clip around the proximal policy would never act.
    """

    advantage: AdvantageConfig = GroupAdvantage()
    """How much better than expected a trajectory, turn or token was."""
    proximal: Literal["recomputed", "interpolated", "behaviour"] = "recomputed"
    """Proximal policy. "recomputed": the learner's weights before the update. "interpolated": between
    behaviour policy and current policy, by policy lag, without a forward pass (A-3PO, arXiv:2512.06547).
    "behaviour": the behaviour policy itself."""
    corrections: tuple[CorrectionConfig, ...] = Field((TruncatedCorrection(),), strict=False)
    """Weights of a token from its ratio proximal / behaviour; all of them are multiplied. Empty: staleness is
    not corrected. Absent: one of kind "truncated" where the surrogate has the ratio current / proximal, and none where
    its own ratio is current / behaviour."""
    surrogate: SurrogateConfig = ClipSurrogate()
    """Objective of a token, from the ratio of current to older probability. Absent: kind "weighted", or kind "clip"
    where a clip acts (several steps per batch, or another proximal policy than "recomputed") or where corrections are
    given."""
    entropy: EntropyBonus = EntropyBonus()
    kl: KlConfig | None = None
    """Penalty on the KL divergence from other policies."""
    distillation: Distillation | None = None
    """Teacher whose log-probabilities are advantages. Absent: none."""
    siblings: SiblingDistillation | None = None
    """Failures with a solved answer in their group learn from the policy that has read it. Absent: as all others."""
    aggregation: AggregationConfig = "token_mean"
    """How token losses become one number. "token_mean": all tokens of the mini-batch have equal weight;
    "sequence_mean": all trajectories have equal weight; or the table of kind "fixed"."""
    updates_per_batch: int = Field(1, ge=1)
    """Mini-batches, one optimizer step each, into which the trajectories of a batch are dealt in each pass.
    At least 1."""
    passes: int = Field(1, ge=1)
    """How often each trajectory of a batch is trained on. At least 1."""
    by_origin: tuple[OriginLoss, ...] = Field((), strict=False)
    """Losses of tokens by who wrote them. (The list is not called routes, because `routes` below are experts.) Absent:
    all tokens have one loss."""
    routes: Literal["current", "proximal", "behaviour"] = "current"
    """Experts of a mixture of experts with which the policy is trained. "current": those that its routers choose
    now. "proximal": those that the learner's weights before the update choose, in all optimizer steps on a batch,
    weighed anew (routing replay R2, arXiv:2512.01374). It acts with several steps only. "behaviour": those that the
    generator chose when it sampled, in all passes, of frozen policies, too (R3 of the same paper, arXiv:2510.11370)."""
    lr_by_ess: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate of a step by the effective sample size of its proximal / behaviour weights, a
    share from 0 to 1 (VCPO, arXiv:2602.17616). "linear": by the share; "sqrt": by its square root."""
    gradient_alignment: float | None = Field(None, ge=0, lt=1)
    """Largest cosine of a gradient with the one of the optimizer step before: what is beyond is taken off along that
    one (GAC, arXiv:2603.01501). It costs a copy of the gradient, and needs learner.zero_stage = 0. At least 0, below 1.
    Absent: gradients are not compared."""
    optimal_baseline: bool = False
    """Take the mean off the advantages of each rollout group that is weighted by (product of the trajectory's ratios
    proximal / behaviour)² times the squared norm of its score, as the variance of stale gradients asks (VCPO,
    arXiv:2602.17616). It costs a forward pass."""
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

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_act(cls, given: Any) -> Any:
        """Choose what is absent so that all of it acts: see `surrogate` and `corrections`."""
        if not isinstance(given, dict) or "corrections" in given:
            return given
        surrogate = given.get("surrogate")
        if surrogate is None:
            steps = (given.get("updates_per_batch", 1), given.get("passes", 1))
            if steps != (1, 1) or given.get("proximal", "recomputed") != "recomputed":
                return given
            return given | {"surrogate": WeightedSurrogate(), "corrections": ()}
        return given | {"corrections": ()} if has_own_ratio(surrogate) else given

    @property
    def compares_entropies(self) -> bool:
        """Whether tokens of the batch are compared by their entropy."""
        return self.entropy_clip is not None or self.advantage_by_entropy > 0

    @property
    def entropy_clip(self) -> EntropySurrogate | None:
        """The surrogate, if its bounds depend on the token's entropy."""
        return self.surrogate if isinstance(self.surrogate, EntropySurrogate) else None

    @property
    def balanced(self) -> BalancedSurrogate | None:
        """The surrogate, if its bounds are chosen anew at each optimizer step."""
        return self.surrogate if isinstance(self.surrogate, BalancedSurrogate) else None

    @property
    def step_bounded(self) -> SecondMomentSurrogate | TailSurrogate | None:
        """The surrogate, if one number over all tokens of an optimizer step decides what it bounds."""
        return self.surrogate if isinstance(self.surrogate, SecondMomentSurrogate | TailSurrogate) else None

    @property
    def balances_trajectories(self) -> bool:
        """Whether the surrogate compares answers with those of the reference model."""
        return isinstance(self.surrogate, TrajectoryBalanceSurrogate)

    @property
    def descends_mirror(self) -> bool:
        """Whether the surrogate has a step size that falls during the run."""
        return isinstance(self.surrogate, MirrorDescentSurrogate)

    @property
    def ratio_variance(self) -> RatioVarianceSurrogate | None:
        """The surrogate, if its factor is a dual variable, which each optimizer step changes."""
        return self.surrogate if isinstance(self.surrogate, RatioVarianceSurrogate) else None

    def objectives(self, field: str = "learner.algorithm") -> list[ChangedObjective]:
        """Return the objective of the first step, then the objective after the reincarnation, if there is one."""
        first = ChangedObjective(field, self.surrogate, self.corrections, self.updates_per_batch, self.passes)
        if (change := self.reincarnation) is None:
            return [first]
        later = ChangedObjective(
            f"{field}.reincarnation",
            change.surrogate,
            change.corrections,
            change.updates_per_batch,
            change.passes,
        )
        return [first, later]

    def contradictions(self, field: str) -> Iterator[str]:
        objectives = self.objectives(field)
        yield from self._advantage(field)
        yield from self._by_origin(field)
        for objective in objectives:
            yield from self._needed_advantage(field, objective)
            yield from self._ratios(field, objective)
            yield from self._steps(objective)
            if self.distillation is not None and objective.surrogate.kind in UNTAUGHT:
                yield (
                    f'{objective.name}.surrogate.kind is "{objective.surrogate.kind}", which reads more of the rewards '
                    f"than advantages of tokens, so {field}.distillation would not reach it; use another surrogate"
                )
            if self.siblings is not None and objective.surrogate.kind in UNTAUGHT:
                yield (
                    f'{objective.name}.surrogate.kind is "{objective.surrogate.kind}", which reads more of the rewards '
                    f"than advantages of tokens, so {field}.siblings would not reach it; use another surrogate"
                )
        if self.siblings is not None:
            beside = {
                "distillation": self.distillation is not None,
                "critic": self.critic is not None,
                "optimal_baseline": self.optimal_baseline,
                "entropy_clip": self.entropy_clip is not None,
                "covariance": self.covariance is not None,
                "advantage_by_entropy": self.advantage_by_entropy > 0,
                'routes = "behaviour"': self.routes == "behaviour",
            }
            yield from not_together(f"{field}.siblings", field, beside)
        if self.lr_by_ess != "none" and self.proximal == "behaviour":
            yield (
                f'{field}.lr_by_ess is "{self.lr_by_ess}" but {field}.proximal is "behaviour": all weights, and the '
                'effective sample size, are 1 then; use proximal = "recomputed"'
            )
        if self.routes == "proximal" and all(objective.steps == 1 for objective in objectives):
            yield (
                f'{field}.routes is "proximal" with a single step per batch, whose routes are those of the proximal '
                f"policy anyway; raise {field}.updates_per_batch, or take it out"
            )
        single = objectives[0].steps == 1 and self.proximal == "recomputed"
        if isinstance(self.kl, KlPenalty) and self.kl.to == "proximal" and single:
            yield (
                f'{field}.kl.to is "proximal" with a single step per batch, which begins at the proximal policy, where '
                f"the penalty has no gradient; raise {field}.passes to 2 or more, or use reference"
            )

    def _by_origin(self, field: str) -> Iterator[str]:
        """Yield what compares all tokens of a batch, beside losses that differ from token to token."""
        if not self.by_origin:
            return
        yield from unreachable(self.by_origin, f"{field}.by_origin")
        if self.surrogate.kind in OF_ALL_TOKENS:
            yield (
                f'{field}.by_origin is set but {field}.surrogate.kind is "{self.surrogate.kind}", which takes a number '
                "from the ratios of all tokens of a step; use another surrogate, or take by_origin out"
            )
        others = {
            "critic": self.critic is not None,
            "reincarnation": self.reincarnation is not None,
            "distillation": self.distillation is not None,
            "optimal_baseline": self.optimal_baseline,
            "lr_by_ess": self.lr_by_ess != "none",
        }
        yield from not_together(f"{field}.by_origin", field, others)
        if any(c.level == "group" for c in self.corrections):
            yield (
                f'{field}.by_origin is set but {field}.corrections have level "group", over tokens of several losses; '
                'use level "sequence" or "token"'
            )

    def _advantage(self, field: str) -> Iterator[str]:
        """Yield what the advantage lacks, or what asks it for something that it does not give."""
        kind = self.advantage.kind
        if kind == "gae" and self.critic is None:
            yield f'{field}.advantage.kind is "gae" but there is no critic; add [{field}.critic]'
        if kind != "gae" and self.critic is not None:
            yield (
                f'{field}.critic is set but {field}.advantage.kind is "{kind}", which asks for no values; take the '
                'critic out or use kind "gae"'
            )
        if self.optimal_baseline and kind not in GROUP_RELATIVE:
            yield (
                f'{field}.optimal_baseline is a mean of rollout groups, but {field}.advantage.kind is "{kind}"; take '
                f"it out, or use one of {', '.join(GROUP_RELATIVE)}"
            )
        if self.scale_by_informative and not judges_groups(self.advantage):
            yield (
                f'{field}.scale_by_informative counts groups, but advantage.kind is "{kind}", not formed within '
                f'groups; take it out, or use one of {", ".join(GROUP_RELATIVE)}, or "compared" among the group'
            )

    def _needed_advantage(self, field: str, objective: ChangedObjective) -> Iterator[str]:
        kind, surrogate = self.advantage.kind, objective.surrogate
        if isinstance(surrogate, RegressionSurrogate) and kind != "gae":
            yield (
                f'{objective.name}.surrogate.kind is "regression", which adds up advantages of tokens, but '
                f'{field}.advantage.kind is "{kind}"; use kind "gae", with a critic'
            )
        if isinstance(surrogate, TrajectoryBalanceSurrogate) and kind not in GROUP_RELATIVE:
            yield (
                f'{objective.name}.surrogate.kind is "trajectory_balance", which compares within rollout groups, but '
                f'{field}.advantage.kind is "{kind}"; use kind "group" with scale = "none"'
            )
        if isinstance(surrogate, TrajectoryBalanceSurrogate) and objective.name != field:
            yield (
                f'{objective.name}.surrogate.kind is "trajectory_balance", whose reference model a reincarnation '
                f"replaces; take {field}.reincarnation out, or use it as {field}.surrogate"
            )
        if isinstance(surrogate, BoundedSurrogate) and kind not in GROUP_RELATIVE:
            yield (
                f'{objective.name}.surrogate.kind is "bounded", which compares with the group\'s median, but '
                f'{field}.advantage.kind is "{kind}"; use one of {", ".join(GROUP_RELATIVE)}'
            )

    def _ratios(self, field: str, objective: ChangedObjective) -> Iterator[str]:
        """Check that staleness is corrected once, and that ratios refer to the policy that the surrogate uses."""
        name, surrogate, corrections, *_ = objective
        if isinstance(surrogate, EntropySurrogate) and self.proximal != "recomputed":
            yield (
                f'{name}.surrogate.kind is "entropy" but {field}.proximal is "{self.proximal}": the entropies are '
                "those of the learner's weights before the update, and its clip is around them; use proximal = "
                '"recomputed", which costs nothing more'
            )
        if self.proximal == "behaviour" and corrections:
            yield (
                f'{field}.proximal is "behaviour": {name}.corrections, of the ratio proximal / behaviour, are all 1 '
                "then; set corrections = [] there"
            )
        if self.proximal != "recomputed" and any(c.level == "group" for c in corrections):
            yield (
                f'{name}.corrections have level "group" but {field}.proximal is "{self.proximal}": the weight of a '
                "group is taken from the learner's weights before the update, which all of its answers have been "
                'shown to; use proximal = "recomputed"'
            )
        weights = [c.kind for c in corrections if getattr(c, "weight", True)]
        itself = isinstance(surrogate, ITSELF)
        if weights and (itself or getattr(surrogate, "centre", "proximal") == "behaviour"):
            centre = "" if itself else ' with centre = "behaviour"'
            yield (
                f'{name}.surrogate of kind "{surrogate.kind}"{centre} has the ratio current / behaviour in it, and '
                f"{name}.corrections ({', '.join(weights)}) would weigh staleness a second time; set corrections = "
                '[], or keep kind "interval" or "divergence" with weight = false only'
            )

    def _steps(self, objective: ChangedObjective) -> Iterator[str]:
        """Yield what has no gradient in the only step on a batch."""
        if objective.steps > 1:
            return
        name, surrogate = objective.name, objective.surrogate
        if isinstance(surrogate, MirrorDescentSurrogate):
            yield (
                f'{name}.surrogate.kind is "mirror_descent" with a single step per batch, of which its KL has no '
                f"gradient; raise {name}.passes to 2 or more"
            )
        if (
            isinstance(surrogate, BalancedSurrogate | RatioVarianceSurrogate)
            and self.proximal == "recomputed"
            and surrogate.centre == "proximal"
        ):
            yield (
                f'{name}.surrogate of kind "{surrogate.kind}" has centre = "proximal" with a single step per batch: '
                f"the ratio is 1, so neither bound nor penalty has a gradient; raise {name}.updates_per_batch to 2 or "
                'more, or use centre = "behaviour"'
            )

    def remarks(self, field: str) -> Iterator[str]:
        """Yield a line for each bound of a surrogate that never acts, unless nobody has named the surrogate."""
        for objective in self.objectives(field):
            if (
                (objective.name != field or "surrogate" in self.model_fields_set)
                and self.proximal == "recomputed"
                and objective.steps == 1
                and has_void_bounds(objective.surrogate)
            ):
                yield (
                    f'{objective.name}.surrogate of kind "{objective.surrogate.kind}" bounds the ratio current / '
                    "proximal, which is 1 with a single step per batch: its bounds never act; raise "
                    f"{objective.name}.updates_per_batch if they are to act"
                )
