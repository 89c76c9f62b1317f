"""`[learner.algorithm.advantage]`: how much better than expected a trajectory, turn or token was.

Each form has its own fields and defaults; docs/recipes says which method each belongs to. The kind "compared" is a sum
of comparisons, and some other kinds are names of one comparison, see `comparisons_of`.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from learner.algorithms.advantages import Scale
from learner.settings.formulas import OwnAdvantage
from protocol.section import OWN, SHIPPED, Section, form_of

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
    """Facts that units must share to be compared. "group": the rollout group; "position": also the number of the
    action turn; "anchor": also the mark `anchor` of the turn, the state that it acted in; "batch": nothing, all units
    of the batch are compared. Empty: the value itself is the advantage, without a baseline."""
    history: int = Field(0, ge=0)
    """Number of turns, for "anchor", before this one, in the same branch, whose anchors must agree, too. At least 0."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per turn of "return_to_go". Above 0, at most 1."""
    scale: Scale = "std"
    """Divisor of the difference to the mean. "std": the standard deviation with divisor G, the number of units;
    "sample_std": with divisor G - 1; "mean_abs": the mean absolute deviation; "none": 1; "leave_one_out": 1, with the
    mean of the other units as baseline. "rank_normal" replaces the value by the normal quantile of its rank."""
    weight: float | Literal["spread"] = 1.0
    """Factor of the term. "spread": the deviation itself; all such terms together are divided by the sum of their
    deviations, so a reward without spread has no say (DVAO, arXiv:2605.25604)."""

    def contradictions(self, field: str) -> Iterator[str]:
        among = set(self.among)
        if len(self.among) > len(among) or ("batch" in among and len(among) > 1):
            yield (
                f'{field}.among is {list(self.among)}: each word once, and "batch" by itself, because it is not within '
                'a group; use ["group"] or ["batch"]'
            )
        elif among and not among & {"group", "batch"}:
            yield f'{field}.among is {list(self.among)}: only members of one group are compared by it; add "group"'
        if self.of == "trajectory" and (turns := sorted(among & {"position", "anchor"})):
            yield f'{field}.among has "{turns[0]}", which turns have, but of is "trajectory"; set of = "turn"'
        if self.of == "trajectory" and self.value == "return_to_go":
            yield f'{field}.value is "return_to_go", which turns have, but of is "trajectory"; set of = "turn"'
        if self.discount != 1 and self.value != "return_to_go":
            yield (
                f'{field}.discount is {self.discount:g} but value is "{self.value}"; only "return_to_go" is discounted'
            )
        if self.history and "anchor" not in among:
            yield f'{field}.history is {self.history} but among has no "anchor", whose history it is; add "anchor"'
        if self.weight == "spread" and (not among or self.scale not in ("std", "sample_std", "mean_abs")):
            yield (
                f'{field}.weight is "spread" but scale "{self.scale}" among {list(self.among)} has no deviation; use '
                'scale "std", "sample_std" or "mean_abs" among the group'
            )


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

    def contradictions(self, field: str) -> Iterator[str]:
        spread = [i for i, term in enumerate(self.terms) if term.weight == "spread"]
        if spread and self.combine == "mean":
            yield (
                f'{field}.combine is "mean" but terms.{spread[0]}.weight is "spread", which divides by a sum of its '
                'own; use combine = "sum"'
            )
        if self.whiten == "trajectories" and is_by_turn(self):
            yield f'{field}.whiten is "trajectories" but a term is of turns; use whiten = "tokens", or "none"'
        if self.novelty is not None and is_by_turn(self):
            yield f'{field}.novelty is of whole answers but a term is of turns; take it out, or set of = "trajectory"'
        if self.amplify is not None and is_by_turn(self):
            yield f'{field}.amplify is of whole episodes but a term is of turns; take it out, or set of = "trajectory"'
        if self.by_difficulty is not None and not all("group" in term.among for term in self.terms):
            yield f"{field}.by_difficulty weighs groups, but a term is not among the group; take by_difficulty out"


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

    def contradictions(self, field: str) -> Iterator[str]:
        if self.levels[0] >= self.levels[1]:
            yield f"{field}.levels are {list(self.levels)}; the first must be below the second: swap them"


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


ShippedAdvantage = Annotated[
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
AdvantageConfig = Annotated[
    Annotated[ShippedAdvantage, Tag(SHIPPED)] | Annotated[OwnAdvantage, Tag(OWN)], Discriminator(form_of)
]
GROUP_RELATIVE = ("group", "leave_one_out", "token_group")
"""Kinds of advantage that compare a whole trajectory with the other members of its group."""
VALUES = {"return", "return_to_go", "each"}
"""Values of a comparison that are no name of a reward."""


def comparisons_of(config: AdvantageConfig) -> ComparedAdvantage | None:
    """Return an advantage as a sum of comparisons; None if it is of a kind that is not one.

    Example:
        >>> comparisons_of(LeaveOneOutAdvantage()).terms[0].scale
        'leave_one_out'
    """
    match config:
        case ComparedAdvantage():
            return config
        case GroupAdvantage(scale=scale):
            term = Comparison(scale=scale)
        case LeaveOneOutAdvantage():
            term = Comparison(scale="leave_one_out")
        case BatchMeanAdvantage(scale=scale):
            term = Comparison(among=("batch",), scale=scale)
        case TurnReturnAdvantage(discount=discount, baseline=baseline):
            term = Comparison(
                of="turn",
                value="return_to_go",
                discount=discount,
                among=("group", "position") if baseline == "group" else (),
                scale="none",
            )
        case _:
            return None
    return ComparedAdvantage(terms=(term,))


def is_by_turn(config: ComparedAdvantage) -> bool:
    """Return whether tokens of one trajectory may have different advantages."""
    return any(term.of == "turn" for term in config.terms)


def judges_groups(config: AdvantageConfig) -> bool:
    """Return whether an advantage is formed within a rollout group alone, so that a group without signal is known.

    Example:
        >>> judges_groups(GroupAdvantage()), judges_groups(ComparedAdvantage(terms=[{"among": ["batch"]}]))
        (True, False)
    """
    if isinstance(config, ComparedAdvantage):
        return all("group" in term.among for term in config.terms)
    return config.kind in GROUP_RELATIVE


def compares_members(config: AdvantageConfig) -> bool:
    """Return whether advantages compare a trajectory with other sampled members of its group.

    Example:
        >>> compares_members(TurnReturnAdvantage()), compares_members(BatchMeanAdvantage())
        (True, False)
    """
    compared = comparisons_of(config)
    return config.kind in (*GROUP_RELATIVE, "risk") or (
        compared is not None and any("group" in term.among for term in compared.terms)
    )


def values_of_parts(advantage: ComparedAdvantage) -> Iterator[tuple[str, str]]:
    """Yield field and name of each reward that a part beside the terms of a comparison reads.

    Such a part reads the return, or one reward: "return_to_go" and "each" are values of terms alone.

    Example:
        >>> list(values_of_parts(ComparedAdvantage(amplify={"value": "right"}, novelty={})))
        [('learner.algorithm.advantage.amplify.value', 'right')]
    """
    parts = {
        "novelty": advantage.novelty,
        "by_difficulty": advantage.by_difficulty,
        "amplify": advantage.amplify,
    }
    for name, part in parts.items():
        if part is not None and part.value != "return":
            yield f"learner.algorithm.advantage.{name}.value", part.value
