"""`[learner.algorithm.advantage]` of kind "compared": an advantage that is a sum of comparisons."""

from typing import Literal

from pydantic import Field

from learner.algorithms.comparisons import Scale
from protocol.section import Section

Among = Literal["group", "position", "anchor", "batch"]


class Comparison(Section):
    """One term of an advantage: the value of a trajectory or turn, compared with the values of others."""

    of: Literal["trajectory", "turn"] = "trajectory"
    """Unit that has a value. "trajectory": all its tokens get one advantage; "turn": the tokens of each action turn
    get one."""
    value: str = Field("return", min_length=1)
    """Value of a unit. "return": the return of its trajectory; "return_to_go": the discounted sum of rewards from the
    turn on, for turns only; "each": a term of its own for every reward that occurs in the batch; any other word is the
    name of a reward: what the trajectory or the turn got of it."""
    among: tuple[Among, ...] = Field(("group",), strict=False)
    """What units must have in common to be compared. "group": the rollout group; "position": also the number of the
    action turn; "anchor": also the mark `anchor` of the turn, the state that it acted in; "batch": nothing, all units
    of the batch are compared. Empty: the value itself is the advantage, without a baseline."""
    history: int = Field(0, ge=0)
    """With "anchor": number of turns before this one, in the same branch, whose anchors must agree, too. At least 0."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per turn of "return_to_go". Above 0, at most 1."""
    scale: Scale = "std"
    """Divisor of the difference to the mean. "std": the standard deviation with divisor G, the number of units;
    "sample_std": with divisor G - 1; "mean_abs": the mean absolute deviation; "none": 1; "leave_one_out": 1, with the
    mean of the other units as baseline. "rank_normal" replaces the value by the normal quantile of its rank."""
    weight: float | Literal["spread"] = 1.0
    """Factor of the term. "spread": the deviation itself; all such terms together are divided by the sum of their
    deviations, so a reward without spread has no say (DVAO, arXiv:2605.25604)."""


class ByDifficulty(Section):
    """Weights of groups by their mean value, so that hard tasks count more (DGPO, arXiv:2601.20614): the number of
    groups with an advantage times the softmax of -mean / temperature over them."""

    value: str = Field("return", min_length=1)
    """Value whose mean over a group says how easy its task is: "return", or the name of a reward."""
    temperature: float = Field(2.0, gt=0)
    """Temperature of the softmax; a large one makes weights equal. Above 0."""


class Novelty(Section):
    """Bonus for right answers that the behaviour policy gave a low probability (XRPO, arXiv:2510.06672):
    min(max(scale (1 - exp(s - mean s)), 0), most A), with s the mean log-probability of a trajectory's tokens and the
    mean over its group."""

    value: str = Field("return", min_length=1)
    """Value that is above 0 for a right answer: "return", or the name of a reward."""
    scale: float = Field(2.5, gt=0)
    """Factor of the novelty. Above 0."""
    most: float = Field(0.5, gt=0)
    """Largest bonus, as a share of the advantage. Above 0."""


class Amplify(Section):
    """Larger advantages of what was better than the mean (R3L, arXiv:2601.03715): an advantage A of at least 0 becomes
    factor A, and 1 where the value is at least `perfect`."""

    value: str = Field("return", min_length=1)
    """Value that says how good a trajectory is: "return", or the name of a reward."""
    perfect: float = 1.0
    """Value from which on the advantage is 1, however the others of the group did."""
    factor: float = Field(3.0, gt=0)
    """Factor of other advantages of at least 0. Above 0."""


class ComparedAdvantage(Section):
    """Sum of comparisons, each of a value of trajectories or turns with that of others. GRPO, GiGPO, HGPO, GDPO, DVAO
    and DGPO are such sums; docs/recipes/comparisons.md has their terms."""

    kind: Literal["compared"] = "compared"
    terms: tuple[Comparison, ...] = Field((Comparison(),), strict=False, min_length=1)
    """Comparisons that are added up."""
    combine: Literal["sum", "mean"] = "sum"
    """How terms become one advantage. "sum": their weighted sum; "mean": the weighted mean of the terms in which the
    unit has somebody to be compared with (HGPO, arXiv:2602.22817)."""
    whiten: Literal["none", "trajectories", "tokens"] = "none"
    """Shift and scale the sum to mean 0 and deviation 1 over the batch: over its trajectories (sample deviation), or
    over its action tokens, where long answers count more."""
    novelty: Novelty | None = None
    """Bonus for unlikely right answers; for terms of trajectories only. Absent: none."""
    by_difficulty: ByDifficulty | None = None
    """Weights of groups by difficulty. Absent: none."""
    amplify: Amplify | None = None
    """Larger advantages of what was better than the mean; for terms of trajectories only. Absent: none."""
