"""Corrections of staleness: weights and masks of a token from the policies before the update and of the generator."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from learner.algorithms.tokens import Level
from learner.settings.formulas import OwnCorrection
from protocol.section import OWN, SHIPPED, Section, form_of

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

    def contradictions(self, field: str) -> Iterator[str]:
        if self.low >= self.high:
            yield (
                f"{field}: low {self.low:g} is not below high {self.high:g}: no token would be left; lower low"
            )


Statistic = Literal["ratio", "log_square", "binary_tv", "binary_kl"]
"""What measures the distance of a policy from the behaviour policy at a sampled token, see
`learner.algorithms.trust_regions.divergence`."""


class DivergenceCorrection(Section):
    """Tokens, turns or trajectories get no gradient where the proximal policy is too far from the behaviour policy, by
    one of four measures (Trust Region Masking, arXiv:2512.23075; FlashREINFORCE, NVIDIA 2026)."""

    kind: Literal["divergence"] = "divergence"
    statistic: Statistic = "binary_kl"
    """Measure of a token. "ratio": |r - 1|, r = proximal / behaviour; "log_square": (log r)²; "binary_tv": |pi - mu|;
    "binary_kl": KL of the two-point distributions "this token" and "another"."""
    level: Level = "sequence"
    """Tokens that are kept or left out together. "token": each by itself; "turn": the turn; "sequence": the
    trajectory."""
    over: Literal["mean", "max"] = "mean"
    """What decides for a turn or a trajectory: the mean over its tokens, or the largest token."""
    bound: float = Field(3e-3, ge=0)
    """Largest distance that is kept. At least 0."""
    weight: bool = True
    """Weight of a token that is kept. True: its own ratio proximal / behaviour; false: 1."""


ShippedCorrection = Annotated[
    TruncatedCorrection | IntervalCorrection | DivergenceCorrection, Field(discriminator="kind")
]
CorrectionConfig = Annotated[
    Annotated[ShippedCorrection, Tag(SHIPPED)] | Annotated[OwnCorrection, Tag(OWN)], Discriminator(form_of)
]
