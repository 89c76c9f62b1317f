"""Contradictions in `[learner]`: a method misses a required part, or corrects something twice.

There is one function per subject. Each yields a line per mistake, with field, value seen and cure.
`launch.run_file.method_effect` has settings without effect.
"""

from collections.abc import Iterator
from typing import NamedTuple

from launch.run_file.credit_rules import credit_contradictions
from launch.run_file.family_rules import family_contradictions
from learner.algorithm_config import (
    GROUP_RELATIVE,
    AlgorithmConfig,
    CorrectionConfig,
    GaeAdvantage,
    IntervalCorrection,
    KlConvex,
    KlPenalty,
)
from learner.config import RESCUE_RULES, LearnerConfig
from learner.credit.reward_config import WinRate
from learner.credit.short_forms import comparisons_of
from learner.credit.signal import judges_groups
from learner.surrogate_config import (
    BalancedSurrogate,
    BoundedSurrogate,
    ClipSurrogate,
    EntropySurrogate,
    LagSurrogate,
    MiniRlSurrogate,
    RegressionSurrogate,
    SurrogateConfig,
    TripletSurrogate,
    WeightedSurrogate,
    WindowSurrogate,
)


def method_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield the mistakes that the rules of this file find."""
    yield from _critic(learner)
    yield from _groups(learner)
    yield from _replay(learner)
    yield from _reincarnation(learner)
    yield from _ratios(learner.algorithm)
    yield from _bounds(learner.algorithm)
    yield from _updates(learner)
    yield from credit_contradictions(learner)
    yield from family_contradictions(learner)


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


def objectives_of(algorithm: AlgorithmConfig) -> Iterator[ChangedObjective]:
    """Yield the objective of the first step, then the objective after the reincarnation, if there is one."""
    name, change = "learner.algorithm", algorithm.reincarnation
    yield ChangedObjective(
        name, algorithm.surrogate, algorithm.corrections, algorithm.updates_per_batch, algorithm.passes
    )
    if change is not None:
        name += ".reincarnation"
        yield ChangedObjective(
            name, change.surrogate, change.corrections, change.updates_per_batch, change.passes
        )


def compares_members(learner: LearnerConfig) -> bool:
    """Return whether advantages compare a trajectory with other sampled members of its group."""
    compared = comparisons_of(learner.algorithm.advantage)
    return learner.algorithm.advantage.kind in (*GROUP_RELATIVE, "risk") or (
        compared is not None and any("group" in term.among for term in compared.terms)
    )


def _critic(learner: LearnerConfig) -> Iterator[str]:
    algorithm = learner.algorithm
    estimated = isinstance(algorithm.advantage, GaeAdvantage)
    if estimated and algorithm.critic is None:
        yield 'learner.algorithm.advantage.kind is "gae" but there is no critic; add [learner.algorithm.critic]'
    if algorithm.critic is not None and not estimated:
        yield (
            f'learner.algorithm.critic is set but learner.algorithm.advantage.kind is "{algorithm.advantage.kind}", '
            'which asks for no values; take the critic out or use kind "gae"'
        )
    for objective in objectives_of(algorithm):
        if isinstance(objective.surrogate, RegressionSurrogate) and not estimated:
            yield (
                f'{objective.name}.surrogate.kind is "regression", which adds up advantages of tokens, but '
                f'learner.algorithm.advantage.kind is "{algorithm.advantage.kind}"; use kind "gae", with a critic'
            )
    if learner.train_on == "windows" and not estimated:
        yield (
            f'learner.train_on is "windows" but learner.algorithm.advantage.kind is "{algorithm.advantage.kind}": '
            'an unfinished trajectory has no return yet; use kind "gae", with a critic'
        )


def _groups(learner: LearnerConfig) -> Iterator[str]:
    kind, algorithm = learner.algorithm.advantage.kind, learner.algorithm
    needs = compares_members(learner)
    if needs and learner.group_size == 1:
        yield f'learner.group_size is 1: an advantage of kind "{kind}" is always zero then; use at least 2'
    if (needs or kind == "greedy") and learner.train_on == "trajectories":
        yield (
            f'learner.train_on is "trajectories" but an advantage of kind "{kind}" needs the whole group; '
            'use train_on = "groups", or kind "gae" with a critic, or "batch_mean"'
        )
    for objective in objectives_of(algorithm):
        if objective.surrogate.kind == "bounded" and kind not in GROUP_RELATIVE:
            yield (
                f'{objective.name}.surrogate.kind is "bounded", which compares with the group\'s median, but '
                f'learner.algorithm.advantage.kind is "{kind}"; use one of {", ".join(GROUP_RELATIVE)}'
            )
    if algorithm.scale_by_informative and not judges_groups(algorithm.advantage):
        yield (
            f'learner.algorithm.scale_by_informative counts groups, but advantage.kind is "{kind}", not formed '
            f'within groups; take it out, or use one of {", ".join(GROUP_RELATIVE)}, or "compared" among the group'
        )


def _replay(learner: LearnerConfig) -> Iterator[str]:
    replay, kind = learner.replay, learner.algorithm.advantage.kind
    if replay is None:
        return
    if learner.algorithm.critic is not None or learner.train_on == "windows":
        yield (
            'learner.replay is set beside a critic or train_on = "windows": values and windows of stored '
            "rollouts are not kept; take [learner.replay] out"
        )
    elif replay.rule == "advantage" and kind not in GROUP_RELATIVE:
        yield (
            f'learner.replay.rule is "advantage" but learner.algorithm.advantage.kind is "{kind}", which cannot be '
            f"kept with one trajectory; use one of {', '.join(GROUP_RELATIVE)}, or another rule"
        )
    elif replay.rule == "advantage" and isinstance(learner.algorithm.surrogate, BoundedSurrogate):
        yield (
            'learner.replay.rule is "advantage" but learner.algorithm.surrogate.kind is "bounded", whose target comes '
            "from a group that a stored trajectory no longer has; use another rule"
        )
    elif replay.rule in RESCUE_RULES and not (compares_members(learner) or kind == "greedy"):
        yield (
            f'learner.replay.rule is "{replay.rule}", which rescues groups, but learner.algorithm.advantage.kind is '
            f'"{kind}"; use one of {", ".join(GROUP_RELATIVE)}, or another rule'
        )
    if replay.outcome != "return" and replay.rule not in RESCUE_RULES:
        yield (
            f'learner.replay.outcome is "{replay.outcome}" but learner.replay.rule is "{replay.rule}", which asks '
            f"for none; take it out, or use one of {', '.join(RESCUE_RULES)}"
        )
    if (
        replay.outcome == "return"
        and replay.rule in RESCUE_RULES
        and isinstance(learner.reward.group, WinRate)
    ):
        yield (
            f'learner.replay.rule is "{replay.rule}" beside learner.reward.group.kind "win_rate": every win rate of a '
            "failed group is 1/2, so no return says that it failed; set learner.replay.outcome to the name of the "
            "reward that a success gets"
        )
    if replay.rule != "advantage" and (alone := [n for n in ("fire_at", "only_with") if getattr(replay, n)]):
        yield (
            f'learner.replay.{alone[0]} is set but learner.replay.rule is "{replay.rule}"; take it out, or use '
            'rule = "advantage"'
        )
    if learner.train_on == "groups" and replay.rule not in RESCUE_RULES and not replay.fire_at:
        fresh = learner.batch_trajectories / learner.group_size * (1 - replay.share)
        if fresh < 1:
            yield (
                f"learner.replay.share is {replay.share:g}: of a batch of {learner.batch_trajectories} trajectories "
                f"not one group of {learner.group_size} would be fresh; lower the share or raise batch_trajectories"
            )
    yield from _table(learner)


def _table(learner: LearnerConfig) -> Iterator[str]:
    """Yield the mistake that the replay table itself finds: it would give nothing, or less than its share."""
    from learner.replay.table import ReplayConfigError, replay_table

    try:
        replay_table(learner)
    except ReplayConfigError as error:
        yield str(error)


def _reincarnation(learner: LearnerConfig) -> Iterator[str]:
    change, replay, kl = learner.algorithm.reincarnation, learner.replay, learner.algorithm.kl
    if change is None:
        return
    if replay is not None and replay.stop_at_step != change.step:
        yield (
            f"learner.algorithm.reincarnation.step is {change.step} but learner.replay.stop_at_step is "
            f"{replay.stop_at_step}: replay ends with the reincarnation; make them equal"
        )
    has_base = isinstance(kl, KlConvex) or (isinstance(kl, KlPenalty) and kl.to == "reference")
    if replay is None and not has_base:
        yield (
            "learner.algorithm.reincarnation is set, but there is neither a base policy to replace nor replay to "
            'end; add [learner.algorithm.kl] (kind "convex", or to = "reference") or [learner.replay]'
        )


def _ratios(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Check that staleness is corrected once, and that ratios refer to the policy that the surrogate uses."""
    for name, surrogate, corrections, *_ in objectives_of(algorithm):
        if isinstance(surrogate, EntropySurrogate) and algorithm.proximal != "recomputed":
            yield (
                f'{name}.surrogate.kind is "entropy" but learner.algorithm.proximal is "{algorithm.proximal}": the '
                "entropies are those of the learner's weights before the update, and its clip is around them; use "
                'proximal = "recomputed", which costs nothing more'
            )
        if algorithm.proximal == "behaviour" and corrections:
            yield (
                f'learner.algorithm.proximal is "behaviour": {name}.corrections, of the ratio proximal / behaviour, '
                "are all 1 then; set corrections = [] there"
            )
        if algorithm.proximal != "recomputed" and any(c.level == "group" for c in corrections):
            yield (
                f'{name}.corrections have level "group" but learner.algorithm.proximal is "{algorithm.proximal}": the '
                "weight of a group is taken from the learner's weights before the update, which all of its answers "
                'have been shown to; use proximal = "recomputed"'
            )
        weights = [c.kind for c in corrections if not isinstance(c, IntervalCorrection) or c.weight]
        itself = isinstance(
            surrogate, MiniRlSurrogate | RegressionSurrogate | TripletSurrogate | WindowSurrogate
        )
        if weights and (itself or getattr(surrogate, "centre", "proximal") == "behaviour"):
            centre = "" if itself else ' with centre = "behaviour"'
            yield (
                f'{name}.surrogate of kind "{surrogate.kind}"{centre} has the ratio current / behaviour in it, and '
                f"{name}.corrections ({', '.join(weights)}) would weigh staleness a second time; set "
                'corrections = [], or keep kind "interval" with weight = false only'
            )


def _bounds(algorithm: AlgorithmConfig) -> Iterator[str]:
    for name, surrogate, corrections, *_ in objectives_of(algorithm):
        for i, correction in enumerate(corrections):
            if isinstance(correction, IntervalCorrection) and correction.low >= correction.high:
                yield (
                    f"{name}.corrections.{i}: low {correction.low:g} is not below high {correction.high:g}: "
                    "no token would be left; lower low"
                )
        yield from _order(f"{name}.surrogate", surrogate)
        yield from _dual(f"{name}.surrogate", surrogate)
    if (mask := algorithm.covariance) is not None and mask.low >= mask.high:
        yield f"learner.algorithm.covariance: low {mask.low:g} is not below high {mask.high:g}; lower low"
    bonus = algorithm.entropy
    if bonus.band is not None and not (bonus.coefficient or bonus.target):
        yield (
            "learner.algorithm.entropy.band is set but entropy.coefficient is 0: the band has the factor of the bonus, "
            "so it would not act; raise coefficient, or take band out"
        )
    if bonus.target and bonus.coefficient > bonus.maximum:
        yield (
            f"learner.algorithm.entropy.coefficient {bonus.coefficient:g} is above its maximum {bonus.maximum:g}; "
            "raise maximum or lower the coefficient"
        )


def _order(field: str, surrogate: SurrogateConfig) -> Iterator[str]:
    match surrogate:
        case BalancedSurrogate(low_start=a, low_stop=b, high_start=c, high_stop=d) if not a <= b < 1 < c <= d:
            yield (
                f"{field}: low {a:g} to {b:g}, high {c:g} to {d:g}: bounds of the ratio must be "
                "low_start <= low_stop < 1 < high_start <= high_stop"
            )
        case WeightedSurrogate(low=low, high=high) if low > high:
            yield f"{field}: low {low:g} is above high {high:g}; lower low"
        case TripletSurrogate(negative_low=low, negative_high=high) if low >= high:
            yield f"{field}: negative_low {low:g} is not below negative_high {high:g}; lower it"
        case _:
            pass


def _dual(field: str, surrogate: SurrogateConfig) -> Iterator[str]:
    match surrogate:
        case ClipSurrogate(high=high) | LagSurrogate(high=high):
            upper = 1 + high
        case EntropySurrogate(high=high):
            # The most uncertain token has the widest clip, with this upper bound.
            upper = 1 + 2 * high
        case BalancedSurrogate(high_stop=high):
            upper = high
        case _:
            return
    if 0 < surrogate.dual <= upper:
        yield (
            f"{field}.dual is {surrogate.dual:g}, not above the clip's own upper bound {upper:g}: it would cut what "
            "the clip lets through; raise it, or set 0 for none"
        )


def _updates(learner: LearnerConfig) -> Iterator[str]:
    algorithm = learner.algorithm
    room, units = learner.batch_trajectories, "trajectories" if learner.train_on != "windows" else "windows"
    if learner.train_on == "groups":
        room, units = learner.batch_trajectories // learner.group_size, "groups"
    for objective in objectives_of(algorithm):
        name, updates = objective.name, objective.updates_per_batch
        if updates > max(1, room):
            yield f"{name}.updates_per_batch is {updates} but a batch has only {room} {units}; lower it"
