"""The parts that recipes are named for, and what is in the place of each where it is taken out.

A part is taken out by changes of the learner's settings, by their names without "learner.". What takes its place is
what grpo has there, or, for a bound, nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from learner.rewards import calls_of, forced_mode, is_flawed, mark_total
from learner.settings.advantages import BatchMeanAdvantage, ComparedAdvantage, GroupAdvantage, ModesReward
from learner.settings.algorithm import EntropyBonus
from learner.settings.learner import LearnerConfig
from learner.settings.surrogates import ClipSurrogate, WeightedSurrogate
from learner.trajectory import Trajectory

FAR = 1e6
"""Bound that no ratio reaches."""
Change = Mapping[str, Any] | Callable[[LearnerConfig], Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """A part of a method."""

    name: str
    """What it is, in words."""
    without: Change
    """Settings that take it out."""
    touched: Callable[[LearnerConfig, list[Trajectory]], tuple[int, int]] | None = None
    """How many trajectories, or turns, the mechanism touched, of how many that it could have touched. Absent: not
    counted."""


@dataclass(frozen=True)
class Method:
    """The parts of a recipe."""

    parts: tuple[Part, ...]


def free(centre: str) -> dict[str, Any]:
    """Return a surrogate without any bound."""
    return {"algorithm.surrogate": WeightedSurrogate(centre=centre, high=FAR)}  # type: ignore[arg-type]


BEHAVIOUR, PROXIMAL = free("behaviour"), free("proximal")
NO_WEIGHT: dict[str, Any] = {"algorithm.corrections": ()}
GROUP = {"algorithm.advantage": GroupAdvantage()}
CENTRED = {"algorithm.advantage": GroupAdvantage(scale="none")}
NO_ENTROPY = {"algorithm.entropy": EntropyBonus()}


def unclipped(learner: LearnerConfig) -> Mapping[str, Any]:
    """Return the settings without the bounds of the clip that the recipe has."""
    surrogate = learner.algorithm.surrogate
    if not isinstance(surrogate, ClipSurrogate):
        return PROXIMAL
    return {
        "algorithm.surrogate": surrogate.model_copy(update={"low": 1.0, "high": FAR, "dual": 0.0}),
    }


def compared(**changes: Any) -> Change:
    """Return the change of some settings of an advantage of comparisons."""

    def change(learner: LearnerConfig) -> Mapping[str, Any]:
        advantage = learner.algorithm.advantage
        assert isinstance(advantage, ComparedAdvantage)
        return {"algorithm.advantage": advantage.model_copy(update=changes)}

    return change


def surrogate(**changes: Any) -> Change:
    """Return the change of some settings of the surrogate."""

    def change(learner: LearnerConfig) -> Mapping[str, Any]:
        return {"algorithm.surrogate": learner.algorithm.surrogate.model_copy(update=changes)}

    return change


def reward(**changes: Any) -> Change:
    """Return the change of some settings of the reward."""
    return {"reward." + name: value for name, value in changes.items()}


WEIGHT = Part("weight by staleness", NO_WEIGHT)
CLIP = Part("clip", unclipped)


def flawed(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count right answers that are called flawed, among the right ones."""
    rule = learner.reward.flawed
    assert rule is not None
    right = [t for t in trajectories if t.correct]
    return sum(is_flawed(rule, given(t)) for t in right), len(right)


def given(t: Trajectory) -> Trajectory:
    """Return a trajectory with the rewards that the environment gave."""
    from learner.rewards import as_given

    return as_given(t)


def dearer(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count right answers that took more calls than the fewest of their group, among the right ones."""
    rule = learner.reward.group
    right: dict[str, list[int]] = {}
    for t in trajectories:
        if t.correct:
            right.setdefault(t.group_id, []).append(calls_of(rule, t))  # type: ignore[arg-type]
    return sum(n > min(own) for own in right.values() for n in own), sum(map(len, right.values()))


def paid_less(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count answers that are worth less because of their mode, among those that chose one."""
    rule = learner.reward.group
    assert isinstance(rule, ModesReward)
    chosen = [t for t in trajectories if not forced_mode(rule, t)]
    return sum(t.return_ < given(t).return_ for t in chosen), len(chosen)


def overlong(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count answers that are long enough for the penalty."""
    rule = learner.reward.length
    assert rule is not None
    return sum(int(t.learned_mask.sum()) > rule.begins_at for t in trajectories), len(trajectories)


def lane_right(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count right answers of the lane, among its answers."""
    lane = [t for t in trajectories if t.lane]
    return sum(bool(t.advantage) for t in lane), len(lane)


def with_calls(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count trajectories with a call."""
    return sum(mark_total(t, "calls") > 0 for t in trajectories), len(trajectories)


def met_elsewhere(learner: LearnerConfig, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Count turns in a state that another trajectory of the group met at another turn, among all turns with a state."""
    met: dict[tuple[str, str | float], list[tuple[str, int]]] = {}
    for t in trajectories:
        for mark in t.marks:
            if mark.name == "anchor":
                met.setdefault((t.group_id, mark.value), []).append((t.trajectory_id, mark.turn))
    touched = sum(
        any(other != one and at != turn for other, at in places)
        for places in met.values()
        for one, turn in places
    )
    return touched, sum(map(len, met.values()))


def one_by_one(learner: LearnerConfig) -> Mapping[str, Any]:
    """Return the weights of a trust region of rollouts, without the region."""
    (correction,) = learner.algorithm.corrections
    return {"algorithm.corrections": (correction.model_copy(update={"bound": FAR}),)}


CRITIC = Part("critic", {"algorithm.advantage": BatchMeanAdvantage(), "algorithm.critic": None})
METHODS: dict[str, Method] = {
    "spell_backward": Method((Part("weight by staleness", {**NO_WEIGHT, **PROXIMAL}),)),
    "calculator": Method((Part("weight by staleness", {**NO_WEIGHT, **PROXIMAL}),)),
    "doors": Method((Part("weight by staleness", {**NO_WEIGHT, **PROXIMAL}),)),
    "grpo": Method((Part("clip around the behaviour policy", BEHAVIOUR),)),
    "uncorrected": Method(
        (Part("weight left out", {"algorithm.surrogate": WeightedSurrogate(centre="behaviour")}),)
    ),
    "dppo": Method((Part("mask by the shift", BEHAVIOUR),)),
    "m2po": Method((Part("mask by the second moment", BEHAVIOUR),)),
    "sat": Method((Part("contraction of the tail", surrogate(quantile=0.9999)), Part("clip", BEHAVIOUR))),
    "drpo": Method((Part("pull", BEHAVIOUR),)),
    "vespo": Method((Part("kernel of the product", BEHAVIOUR),)),
    "trm": Method((Part("mask of rollouts", one_by_one),)),
    "flash-reinforce": Method(
        (
            Part("trust region of rollouts", one_by_one),
            Part("every rollout alike", {"algorithm.aggregation": "token_mean"}),
        )
    ),
    "sao": Method((Part("rejection", surrogate(outside="bound", low=0.0, high=FAR)), CRITIC)),
    "vcpo": Method((Part("optimal baseline", {"algorithm.optimal_baseline": False}),)),
    "tba": Method((Part("balance with the reference", PROXIMAL),)),
    "cispo": Method((Part("bounded weight", PROXIMAL),)),
    "bapo": Method(
        (
            Part(
                "moving bounds", {"algorithm.surrogate": ClipSurrogate(centre="behaviour", low=0.2, high=0.2)}
            ),
        )
    ),
    "r2vpo": Method((Part("penalty on the variance", BEHAVIOUR),)),
    "gbpo": Method((Part("pull to the bounds", BEHAVIOUR),)),
    "decoupled-ppo": Method((WEIGHT, CLIP)),
    "icepop": Method((Part("interval", NO_WEIGHT), CLIP)),
    "minirl": Method(
        (
            Part("weight", {"algorithm.surrogate": ClipSurrogate(low=0.2, high=0.27)}),
            Part("mask", surrogate(low=1.0, high=FAR)),
        ),
    ),
    "hispo": Method((Part("masks", NO_WEIGHT), Part("triplet clip", BEHAVIOUR))),
    "gspo": Method((Part("weight by responses", NO_WEIGHT), Part("clip by responses", unclipped))),
    "hapo": Method(
        (
            Part("advantages over tokens", GROUP),
            Part("bounds by entropy", surrogate(low=1.0, high=FAR, dual=0.0)),
            Part("redistribution", surrogate(redistribute=False)),
        )
    ),
    "mdpo": Method((Part("KL of the mirror", PROXIMAL),)),
    "lag-clip": Method((Part("contraction by lag", surrogate(contraction=0.0)),)),
    "rloo": Method((Part("leave-one-out baseline", CENTRED),)),
    "remax": Method((Part("greedy baseline", CENTRED),)),
    "ipa": Method(
        (
            Part("return by turns", CENTRED),
            Part("mask by turns", NO_WEIGHT),
            Part("ratio of bad turns", PROXIMAL),
        )
    ),
    "ppo": Method(
        (
            CRITIC,
            CLIP,
        )
    ),
    "gdpo": Method((Part("each reward normalised", GROUP),)),
    "dvao": Method((Part("weights by spread", GROUP),)),
    "g2rpo": Method((Part("ranks", GROUP),)),
    "dgpo": Method(
        (
            Part("one total size", lambda learner: {**compared(terms=(_std(),))(learner)}),  # type: ignore[operator]
            Part("weights by difficulty", compared(by_difficulty=None)),
        )
    ),
    "loop": Method(
        (Part("leave-one-out baseline", CENTRED), Part("narrow clip", unclipped)),
    ),
    "grpo-tcr": Method(
        (
            Part("value of wrong answers", reward(wrong=None)),
            Part("penalty on length", reward(length=None), overlong),
            CLIP,
        )
    ),
    "dapo": Method(
        (
            Part("higher upper clip", surrogate(high=0.2)),
            Part("penalty on length", reward(length=None), overlong),
            Part("dynamic sampling", {"filter_uniform_groups": False}),
        )
    ),
    "dr-grpo": Method(
        (
            Part("no deviation", GROUP),
            Part("constant in place of lengths", {"algorithm.aggregation": "sequence_mean"}),
        )
    ),
    "reinforce-plus-plus": Method((Part("baseline of the batch", GROUP),)),
    "flow-grpo": Method((Part("statistics over turns", GROUP),)),
    "eapo": Method((Part("discount of later turns", GROUP),)),
    "gigpo": Method(
        (
            Part("comparison within states", lambda learner: _first_term(learner)),
            Part("states, not positions", lambda learner: _by_position(learner), met_elsewhere),
        )
    ),
    "hgpo": Method((Part("comparison within histories", GROUP),)),
    "a2fm": Method((Part("price of a mode", reward(group=None), paid_less),)),
    "otc": Method((Part("factor by calls", reward(group=None), dearer),)),
    "prs": Method((Part("first stage", reward(stages=())),)),
    "epo": Method(
        (Part("entropy bonus and band", NO_ENTROPY),),
    ),
    "aepo-entropy": Method(
        (Part("right answers of the lane", lambda learner: _lane_without_advantage(learner), lane_right),),
    ),
    "spo-winrate": Method((Part("win rate", reward(group=None)),)),
    "fapo-rule": Method((Part("penalty on flawed answers", reward(flawed=None), flawed),)),
    "fapo-judge": Method((Part("penalty on flawed answers", reward(flawed=None), flawed),)),
    "riskpo": Method((Part("risk of bundles", GROUP),)),
    "xrpo-novelty": Method((Part("bonus for novelty", compared(novelty=None)),)),
    "subpo": Method((Part("reward for new states", reward(coverage=None)),)),
    "aepo-agentic": Method(
        (
            Part("gradient of clipped tokens", surrogate(keep_gradient=False)),
            Part("advantages by entropy", {"algorithm.advantage_by_entropy": 0.0}),
        )
    ),
    "dapo-direct": Method((Part("regression of log-ratios", PROXIMAL),)),
    "remix": Method((Part("window", PROXIMAL), Part("KL to base and predecessor", {"algorithm.kl": None}))),
    "tppo": Method((Part("clip", unclipped), Part("imitation", {"algorithm.imitation_coefficient": 0.0}))),
}


def _std() -> Any:
    from learner.settings.advantages import Comparison

    return Comparison(of="trajectory", value="return", among=("group",), scale="std")


def _lane_without_advantage(learner: LearnerConfig) -> Mapping[str, Any]:
    assert learner.lane is not None
    return {"lane": learner.lane.model_copy(update={"coefficient": 0.0})}


def _first_term(learner: LearnerConfig) -> Mapping[str, Any]:
    advantage = learner.algorithm.advantage
    assert isinstance(advantage, ComparedAdvantage)
    return {"algorithm.advantage": advantage.model_copy(update={"terms": advantage.terms[:1]})}


def _by_position(learner: LearnerConfig) -> Mapping[str, Any]:
    """Return the advantage with turns compared by their number in the episode, and not by their state."""
    advantage = learner.algorithm.advantage
    assert isinstance(advantage, ComparedAdvantage)
    terms = tuple(
        term.model_copy(update={"among": tuple("position" if by == "anchor" else by for by in term.among)})
        for term in advantage.terms
    )
    return {"algorithm.advantage": advantage.model_copy(update={"terms": terms})}


def changed(learner: LearnerConfig, change: Change) -> LearnerConfig:
    """Return the settings with a part taken out."""
    changes = change(learner) if callable(change) else change
    for name, value in changes.items():
        *tables, last = name.split(".")
        if tables:
            (table,) = tables
            section = getattr(learner, table).model_copy(update={last: value})
            learner = learner.model_copy(update={table: section})
        else:
            learner = learner.model_copy(update={last: value})
    return learner
