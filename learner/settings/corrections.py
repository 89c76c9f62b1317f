"""`[[learner.algorithm.corrections]]`: the weight of a token from the ratio proximal / behaviour."""

from typing import Annotated, Literal

from pydantic import Field

from learner.algorithms.levels import Level
from protocol.section import Section

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
