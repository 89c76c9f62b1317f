"""`[learner.reward]`: how the rewards of an environment become the values that are compared."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from learner.settings.formulas import OwnReward
from protocol.section import Section

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


GroupReward = Annotated[FewestCalls | WinRate, Field(discriminator="kind")]


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
