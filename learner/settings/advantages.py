"""`[learner.algorithm.advantage]`: how much better than expected a trajectory, turn or token was.

Each form has its own fields and defaults; docs/recipes says which method each belongs to.
"""

from typing import Annotated, Literal

from pydantic import Field

from learner.credit.comparison_config import ComparedAdvantage
from protocol.section import Section


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
