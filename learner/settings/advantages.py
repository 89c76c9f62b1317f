"""`[learner.reward]` and `[learner.algorithm.advantage]`: from given rewards to how much better than expected they are.

Rewards are composed of those that the environment gave. Each form of advantage has its own fields and defaults;
docs/recipes says which method each belongs to. The kind "compared" is a sum of comparisons, and some other kinds are
names of one comparison, see `comparisons_of`.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from learner.algorithms.advantages import Scale
from learner.settings.formulas import OwnAdvantage, OwnReward
from protocol.messages.fields import MAX_TEXT
from protocol.section import OWN, SHIPPED, Section, form_of

RewardName = Annotated[str, Field(min_length=1)]


class RewardStage(Section):
    """Weights of rewards at the beginning of training (PRS, arXiv:2512.07478). Stages follow one another; after the
    last one the weights of `[learner.reward]` hold alone."""

    until_version: int = Field(ge=1)
    """Policy version at which the stage ends. A group is of the stage in which its newest token was sampled, so a
    group has one value whenever it is trained. Numbers that restarts of the learner skip do not count. At least 1, more
    than in the stage before, and at most the newest version that the run trains on."""
    weights: dict[str, float]
    """Weights by name, which replace those of `[learner.reward]` for these names."""


class Gate(Section):
    """A reward that counts only for a trajectory that got enough of a different one (GDPO's conditioned rewards,
    arXiv:2601.05242)."""

    reward: RewardName
    """Name of the reward that counts, or is 0."""
    needs: RewardName
    """Name of the reward that decides."""
    above: float = 0.0
    """The gate is open if the trajectory's sum of `needs`, without weight, is above this."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.reward == self.needs:
            yield f'{field} has reward and needs "{self.needs}": nothing is its own condition; change one'


class FewestCalls(Section):
    """A right answer is worth less, the more calls it took in comparison with the fewest calls of a right answer in
    its group (OTC, arXiv:2504.14870)."""

    kind: Literal["fewest_calls"] = "fewest_calls"
    reward: RewardName
    """Name of the reward that is multiplied by a factor of at most 1 where it is above 0."""
    calls: str = ""
    """Name of the mark that counts the calls of a turn. Absent: the turns before the last one are the calls."""
    smooth: float = Field(1.0, gt=0)
    """Constant of the factor where the fewest calls are none, and m are taken: cos(m pi / (2 m + smooth)). Above 0."""


class WinRate(Section):
    """A reward becomes the share of the other members that it beats; a draw counts half (SPO, arXiv:2401.04056)."""

    kind: Literal["win_rate"] = "win_rate"
    reward: RewardName = "return"
    """Name of the reward that is compared and replaced. "return": the sum of all rewards after stages, gates, weights
    and the penalty on length; its win rate is the reward `win_rate` and replaces all."""


Opening = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class ModesReward(Section):
    """Modes of answering, of which a cheap one is to be taken where it is enough (APO of A2FM, arXiv:2510.12838).

    The last members of a group begin their first answer with the opening of a mode, `each` of them in each mode. The
    others choose by what they write. A right answer of theirs in another mode than the cheap one is worth 1 - p^power,
    where p is the share of right answers among the members that were forced. Forced members keep their rewards."""

    kind: Literal["modes"] = "modes"
    reward: RewardName
    """Name of the reward of a right answer, which is multiplied by the factor."""
    openings: dict[str, Opening]
    """Beginning of the first answer in each mode, by its name. At least 2, and none begins with another one. Its tokens
    are context where Offbeat writes them, and trained where the policy does. The environment reads them."""
    cheap: str
    """Name of the mode that is not paid less."""
    each: int = Field(3, ge=1)
    """Members of a group that are forced into each mode. At least 1. The paper has 12 members: 3 for each of 3 modes,
    and 3 that choose."""
    power: float = Field(2.0, gt=0)
    """Power of p. Above 0; above 1, tasks that are solved seldom are hardly paid less."""
    mark: str = Field("mode", min_length=1)
    """Name of the mark by which the environment says the mode of an answer, in its first turn."""

    @property
    def forced(self) -> int:
        """Members of a group that are forced into a mode."""
        return self.each * len(self.openings)

    def of_member(self, member: int, group_size: int) -> str:
        """Return the mode into which a member of a group is forced; "" if it chooses.

        Example:
            >>> modes = ModesReward(reward="answer", openings={"fast": "=", "tool": "call"}, cheap="fast", each=2)
            >>> [modes.of_member(member, 6) for member in range(6)]
            ['', '', 'fast', 'fast', 'tool', 'tool']
        """
        place = member - (group_size - self.forced)
        return list(self.openings)[place // self.each] if place >= 0 else ""

    def contradictions(self, field: str) -> Iterator[str]:
        if len(self.openings) < 2:
            yield f"{field}.openings has {len(self.openings)} modes; there is nothing to choose below 2: add a mode"
        if self.cheap not in self.openings:
            yield (
                f'{field}.cheap is "{self.cheap}", which has no opening (modes: {", ".join(self.openings)}); name one '
                "of the modes"
            )
        for name, text in self.openings.items():
            longer = next((n for n, t in self.openings.items() if n != name and t.startswith(text)), None)
            if longer is not None:
                yield (
                    f'{field}.openings.{longer} begins with that of "{name}", so nobody can tell their answers apart; '
                    "change one"
                )


class WrongAnswer(Section):
    """Value of a wrong answer, less bad after more turns: min(highest, lowest + per_turn * (turns - 1)) (GRPO-TCR,
    arXiv:2510.11701)."""

    reward: RewardName
    """Name of the reward. A trajectory whose sum of it is not above 0 gets this value in its place."""
    lowest: float = -1.0
    """Value after one turn."""
    per_turn: float = Field(0.1, ge=0)
    """Amount that each further turn adds. At least 0."""
    highest: float = -0.6
    """Largest value of a wrong answer. At least `lowest`."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.highest < self.lowest:
            yield f"{field}.highest {self.highest:g} is below lowest {self.lowest:g}; raise highest"


class Coverage(Section):
    """Reward for each turn that leads to a state that the trajectory has not been in: the marginal gain of a set of
    states (SubPO, arXiv:2307.13372). It is the reward `coverage`."""

    mark: str = Field("anchor", min_length=1)
    """Name of the mark that is the state that a turn is taken in. The turn before it gains."""
    each: float = 1.0
    """Reward of a new state."""


class FlawedAnswer(Section):
    """Penalty on a right answer that was reached by a flawed way (FAPO, arXiv:2510.22543): it did not get enough of a
    different reward, which a rule or a judge gives. It is the reward `flawed`."""

    reward: RewardName
    """Name of the reward whose sum is above 0 for a right answer."""
    needs: RewardName
    """Name of the reward that a sound way gets."""
    least: float
    """A right answer whose sum of `needs` is below this is flawed."""
    penalty: float = Field(1.0, gt=0)
    """Amount that a flawed answer loses. Above 0."""
    trained: bool = True
    """True if the reward `needs` is itself a part of the return. False: it is recorded and shown, and decides what is
    flawed, as with weight 0; then it may have no other weight, neither here nor in a stage."""


class CoolingBonus(Section):
    """Bonus for calls of tools, which falls to 0 along half a cosine while training goes on (SPEAR, arXiv:2509.22601).
    It is the reward `bonus`."""

    mark: str = Field("calls", min_length=1)
    """Name of the mark that counts the calls of a turn."""
    per_call: float = Field(0.1, gt=0)
    """Bonus of a call at the start. Above 0."""
    most: float = Field(1.0, gt=0)
    """Largest bonus of a trajectory at the start. Above 0."""
    until_version: int = Field(100, ge=1)
    """Policy version from which on there is no bonus; numbers that restarts skip do not count. At least 1."""


class StepReward(Section):
    """Value of an answer by what its calls brought, which a mark of each call says (RAPO of Fathom-DeepResearch,
    arXiv:2509.24107). A right answer loses the share of its redundant calls; a wrong one gains by new calls."""

    reward: RewardName
    """Name of the reward that is replaced. A trajectory whose sum of it is above 0 is right."""
    mark: str = Field("call", min_length=1)
    """Name of the mark that labels the call of a turn. A label that is not listed below is no call."""
    searches: tuple[str, ...] = Field(("search",), strict=False)
    """Labels of searches that were new."""
    redundant_searches: tuple[str, ...] = Field(("redundant_search",), strict=False)
    """Labels of searches that brought nothing."""
    queries: tuple[str, ...] = Field(("exploration", "verification"), strict=False)
    """Labels of other calls that brought something."""
    redundant_queries: tuple[str, ...] = Field(("redundant_query",), strict=False)
    """Labels of other calls that brought nothing."""
    least: float = Field(0.5, ge=0, le=1)
    """Smallest value of a right answer. 0 to 1."""
    search_share: float = Field(0.2, ge=0)
    """Largest value that new searches give to a wrong answer. At least 0."""
    most_searches: int = Field(8, ge=1)
    """New searches, less redundant ones, for this value. At least 1."""
    query_share: float = Field(0.2, ge=0)
    """Largest value that other new calls give to a wrong answer. At least 0."""
    most_queries: int = Field(16, ge=1)
    """Other new calls, less redundant ones, for this value. At least 1."""


class OverlongPenalty(Section):
    """Penalty on answers that come near a limit: 0 up to `buffer_tokens` below it, then falling to `-factor` at the
    limit and beyond (DAPO, arXiv:2503.14476; GRPO-TCR, arXiv:2510.11701). It is the reward `overlong`, which may have
    weights and gates like any other."""

    longest_tokens: int = Field(ge=1)
    """Action tokens of a trajectory at which the penalty is full. At least 1."""
    buffer_tokens: int = Field(ge=1)
    """Tokens over which the penalty falls. At least 1, at most `longest_tokens`."""
    factor: float = Field(1.0, gt=0)
    """Size of the full penalty. Above 0."""

    @property
    def begins_at(self) -> int:
        """Tokens up to which there is no penalty; negative if `buffer_tokens` is too large."""
        return self.longest_tokens - self.buffer_tokens

    def contradictions(self, field: str) -> Iterator[str]:
        if self.begins_at < 0:
            yield (
                f"{field}.buffer_tokens is {self.buffer_tokens}, above longest_tokens {self.longest_tokens}: every "
                "answer would be too long; lower buffer_tokens"
            )


GroupReward = Annotated[FewestCalls | WinRate | ModesReward, Field(discriminator="kind")]


class RewardConfig(Section):
    """`[learner.reward]`: how the rewards of an environment form the return. Journal and metrics `reward/NAME` have
    the rewards as the environment gave them."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward, by its name. The return is the weighted sum; a name that is not here has weight 1.
    0: the reward is recorded and shown, and does not act. Journal and metrics `reward/NAME` have the values
    without weights."""
    stages: tuple[RewardStage, ...] = Field((), strict=False)
    """Other weights at the beginning of training."""
    gates: tuple[Gate, ...] = Field((), strict=False)
    """Rewards that count only beside a different one."""
    wrong: WrongAnswer | None = None
    """Value of wrong answers by their turns. Absent: as the environment gave it."""
    steps: StepReward | None = None
    """Value of answers by the labels of their calls. Absent: as the environment gave it."""
    group: GroupReward | None = None
    """Reward that needs the whole rollout group. It does not act in evaluations, which have no groups."""
    coverage: Coverage | None = None
    """Reward for states that are new to a trajectory. Absent: none."""
    bonus: CoolingBonus | None = None
    """Bonus for calls at the beginning of training. Absent: none."""
    flawed: FlawedAnswer | None = None
    """Penalty on right answers by a flawed way. Absent: none."""
    length: OverlongPenalty | None = None
    """Penalty on long answers. Absent: none."""
    own: OwnReward | None = None
    """Composition of rewards of your own, which comes last. Absent: none."""

    @property
    def weights_in_force(self) -> dict[str, float]:
        """Weights after all stages, with 0 for a reward that only decides what is flawed."""
        untrained = {self.flawed.needs: 0.0} if self.flawed is not None and not self.flawed.trained else {}
        return untrained | self.weights

    def contradictions(self, field: str) -> Iterator[str]:
        replacing = [part for part in ("wrong", "steps") if getattr(self, part)]
        if self.group is not None and replacing:
            yield (
                f'{field}.group.kind is "{self.group.kind}" beside {field}.{replacing[0]}: both replace rewards, and '
                "the group would be compared without the other; take one of them out"
            )
        elif len(replacing) == 2:
            yield f"{field}.wrong and {field}.steps are both set, and both replace rewards; take one of them out"
        ends = [stage.until_version for stage in self.stages]
        if ends != sorted(set(ends)):
            yield f"{field}.stages end at versions {ends}; each must end later than the one before: put them in order"
        yield from self._untrained(field)

    def _untrained(self, field: str) -> Iterator[str]:
        """Yield the refusal of each weight of a reward that `flawed` leaves out of the return."""
        flawed = self.flawed
        if flawed is None or flawed.trained:
            return
        weights = {"weights": self.weights} | {
            f"stages.{i}.weights": stage.weights for i, stage in enumerate(self.stages)
        }
        for name, named in weights.items():
            if weight := named.get(flawed.needs):
                yield (
                    f"{field}.{name}.{flawed.needs} is {weight:g} but {field}.flawed.trained is false, which leaves "
                    "this reward out of the return; take the weight out, or set trained = true"
                )


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

    value: str = Field("correct", min_length=1)
    """Value whose mean over a group says how easy its task is. "correct": 1 for a right answer and 0 for a wrong one
    where the environment tells, else the return; "return"; or the name of a reward. A group with mean 0, in which
    nobody solved the task, weighs as an easy one."""
    temperature: float = Field(2.0, gt=0)
    """Temperature of the softmax; a large one makes weights equal. Above 0."""


class Novelty(Section):
    """Bonus for right answers that the behaviour policy gave a low probability (XRPO, arXiv:2510.06672):
    min(max(scale (1 - exp(s - mean s)), 0), most A), with s the mean log-probability of a trajectory's tokens and the
    mean over its group."""

    value: str = Field("correct", min_length=1)
    """Value that is above 0 for a right answer. "correct": the environment's word where it gives it, else the return;
    "return"; or the name of a reward. An answer that the environment calls wrong is never right."""
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
    most_share: float = Field(7.0, gt=0)
    """Bound of the share of a paper's advantage that one of its tasks gets. With returns of 0 and 1, groups of 8 and
    bundles of 4 or 5, as the authors have, no share is larger; partial credit brings the divisor near 0. Above 0."""

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
VALUES = {"return", "return_to_go", "each", "correct"}
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
        if part is not None and part.value not in ("return", "correct"):
            yield f"learner.algorithm.advantage.{name}.value", part.value
