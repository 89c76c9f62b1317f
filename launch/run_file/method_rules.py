"""Contradictions in `[learner]`: objectives, ratios and replay that cannot be, and settings that have no effect.

There is one function per subject. Each yields a line per mistake, with field, value seen and cure. A setting without
effect that a user must have chosen is a mistake, because no recipe has it. What the defaults have, too, is a note.
"""

from collections.abc import Iterator
from typing import NamedTuple

from launch.run_file.reward_rules import credit_contradictions, family_contradictions, family_notes
from learner.settings.advantages import GROUP_RELATIVE, GaeAdvantage, comparisons_of, judges_groups
from learner.settings.algorithm import (
    AlgorithmConfig,
    BalancedSurrogate,
    BoundedSurrogate,
    ChunkSurrogate,
    ClipSurrogate,
    CorrectionConfig,
    EntropySurrogate,
    IntervalCorrection,
    KlConvex,
    KlPenalty,
    LagSurrogate,
    MiniRlSurrogate,
    MirrorDescentSurrogate,
    RatioVarianceSurrogate,
    RegressionSurrogate,
    SurrogateConfig,
    TripletSurrogate,
    WeightedSurrogate,
    WindowSurrogate,
)
from learner.settings.learner import RESCUE_RULES, LearnerConfig, ReplayConfig
from learner.settings.rewards import WinRate


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


def ratio_contradictions(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    yield from _ratios(algorithm)
    yield from _bounds(algorithm)


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


def replay_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    yield from _replay(learner)
    yield from _reincarnation(learner)


def _replay(learner: LearnerConfig) -> Iterator[str]:
    replay = learner.replay
    if replay is None:
        return
    yield from _kept(learner, replay)
    yield from _outcomes(learner, replay)
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


def _kept(learner: LearnerConfig, replay: ReplayConfig) -> Iterator[str]:
    """Yield the refusal of what a table cannot keep, or cannot rescue."""
    kind = learner.algorithm.advantage.kind
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


def _outcomes(learner: LearnerConfig, replay: ReplayConfig) -> Iterator[str]:
    """Yield the refusal of an outcome that says nothing, or that nobody asks for."""
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


def _table(learner: LearnerConfig) -> Iterator[str]:
    """Yield the mistake that the replay table itself finds: it would give nothing, or less than its share."""
    from learner.errors import ReplayConfigError
    from learner.replay.table import replay_table

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


ADAPTERS_LR = 1e-5
"""Learning rate below which adapters hardly learn: ten times the default, which is for full weights."""


def settings_without_effect(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line for each setting that would do nothing, or harm."""
    algorithm = learner.algorithm
    if algorithm.lr_by_ess != "none" and algorithm.proximal == "behaviour":
        yield (
            f'learner.algorithm.lr_by_ess is "{algorithm.lr_by_ess}" but learner.algorithm.proximal is "behaviour": '
            'all weights, and the effective sample size, are 1 then; use proximal = "recomputed"'
        )
    if algorithm.scale_by_informative and learner.drops_uniform_groups:
        yield (
            "learner.algorithm.scale_by_informative is true, but learner.filter_uniform_groups drops the groups with "
            "equal returns before they are counted: the factor is always 1; set filter_uniform_groups = false"
        )
    if algorithm.proximal == "interpolated" and learner.publish_every > 1:
        yield (
            'learner.algorithm.proximal is "interpolated" but learner.publish_every is '
            f"{learner.publish_every}: it goes by lag, which counts versions, so tokens up to "
            f"{learner.publish_every - 1} updates old would not be corrected; use publish_every = 1 or proximal = "
            '"recomputed"'
        )
    steps = max(objective.steps for objective in objectives_of(algorithm))
    if algorithm.routes == "proximal" and steps == 1:
        yield (
            'learner.algorithm.routes is "proximal" with a single step per batch, whose routes are those of the '
            "proximal policy anyway; raise learner.algorithm.updates_per_batch, or take it out"
        )
    yield from _kl(algorithm)
    for objective in objectives_of(algorithm):
        yield from _surrogate(objective, recomputed=algorithm.proximal == "recomputed")


def notes(learner: LearnerConfig, *, segment_tokens: int) -> Iterator[str]:
    """Yield a line for each part of the method that never acts, and for what is larger or smaller than it looks.

    Args:
        segment_tokens: `actor.segment_tokens`, the length of a window.
    """
    if learner.train_on == "windows" and segment_tokens >= learner.sampling.max_turn_tokens:
        yield (
            f"actor.segment_tokens is {segment_tokens}, not below learner.sampling.max_turn_tokens "
            f"{learner.sampling.max_turn_tokens}: windows end with their turn, so hardly any answer is trained before "
            "it ends; set segment_tokens to a third of the longest answer, for example"
        )
    for objective in objectives_of(learner.algorithm):
        if (
            learner.algorithm.proximal == "recomputed"
            and objective.steps == 1
            and _has_void_bounds(objective)
        ):
            yield (
                f'{objective.name}.surrogate of kind "{objective.surrogate.kind}" bounds the ratio current / proximal, '
                "which is 1 with a single step per batch: its bounds never act; raise "
                f"{objective.name}.updates_per_batch if they are to act"
            )
    if learner.publish_every > 1:
        oldest = (learner.lag_bound + 1) * learner.publish_every - 1
        yield (
            f"learner.max_policy_lag is {learner.lag_bound} with learner.publish_every {learner.publish_every}: lag "
            f"counts versions, so a token that is trained may be {oldest} updates old; lower one of them if that is "
            "too old"
        )
    if learner.nodes > 1:
        yield (
            f"learner.nodes is {learner.nodes}: the learner waits at {learner.rendezvous} for its other hosts; on "
            f"each, run offbeat learner RUN_FILE --node N, with N from 1 to {learner.nodes - 1}"
        )
    yield from family_notes(learner)
    yield from _lora(learner)


def _lora(learner: LearnerConfig) -> Iterator[str]:
    if learner.lora is None:
        return
    if learner.optimizer.lr < ADAPTERS_LR:
        yield (
            f"learner.optimizer.lr is {learner.optimizer.lr:g} with [learner.lora]: adapters take 10 to 100 times the "
            f"learning rate of full weights; try {ADAPTERS_LR:g} to {10 * ADAPTERS_LR:g}"
        )
    critic = learner.algorithm.critic
    if critic is not None and critic.model == "separate":
        yield (
            'learner.algorithm.critic.model is "separate" with [learner.lora]: the critic is a second model without '
            'adapters, of which all weights are trained; use model = "head" to save its memory'
        )


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl = algorithm.kl
    if kl is None:
        return
    if kl.estimator == "k1":
        yield (
            'learner.algorithm.kl.estimator is "k1": as a loss its gradient is zero on average, so it regularises '
            'nothing; use "k2" or "k3"'
        )
    single = algorithm.updates_per_batch * algorithm.passes == 1
    if isinstance(kl, KlPenalty) and kl.to == "proximal" and single and algorithm.proximal == "recomputed":
        yield (
            'learner.algorithm.kl.to is "proximal" with a single step per batch, which begins at the proximal policy, '
            "where the penalty has no gradient; raise learner.algorithm.passes to 2 or more, or use reference"
        )


def _surrogate(objective: ChangedObjective, *, recomputed: bool) -> Iterator[str]:
    name, single = objective.name, objective.steps == 1
    match objective.surrogate:
        case MirrorDescentSurrogate() if single:
            yield (
                f'{name}.surrogate.kind is "mirror_descent" with a single step per batch, of which its KL has no '
                f"gradient; raise {name}.passes to 2 or more"
            )
        case BalancedSurrogate() | RatioVarianceSurrogate() as surrogate if (
            single and recomputed and surrogate.centre == "proximal"
        ):
            yield (
                f'{name}.surrogate of kind "{surrogate.kind}" has centre = "proximal" with a single step per batch: '
                "the ratio is 1, so neither bound nor penalty has a gradient; raise "
                f'{name}.updates_per_batch to 2 or more, or use centre = "behaviour"'
            )
        case TripletSurrogate(negative_low=low, negative_high=ceiling, positive_high=high):
            no_gradient = "fresh tokens, whose ratio is 1, would get no gradient; set it to"
            if 1 < low < ceiling:
                yield f"{name}.surrogate.negative_low is {low:g}: {no_gradient} at most 1"
            if high < 1:
                yield f"{name}.surrogate.positive_high is {high:g}: {no_gradient} at least 1"
        case _:
            pass


def _has_void_bounds(objective: ChangedObjective) -> bool:
    """Return whether the surrogate does nothing but bound the ratio current / proximal."""
    match objective.surrogate:
        case EntropySurrogate() | LagSurrogate() | MiniRlSurrogate() | ChunkSurrogate():
            return True
        case ClipSurrogate(centre=centre) | WeightedSurrogate(centre=centre):
            return centre == "proximal"
        case _:
            return False


def method_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield the mistakes that the rules of this file and of those beside it find."""
    yield from _critic(learner)
    yield from _groups(learner)
    yield from replay_contradictions(learner)
    yield from ratio_contradictions(learner.algorithm)
    yield from _updates(learner)
    yield from credit_contradictions(learner)
    yield from family_contradictions(learner)


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


def _updates(learner: LearnerConfig) -> Iterator[str]:
    algorithm = learner.algorithm
    room, units = learner.batch_trajectories, "trajectories" if learner.train_on != "windows" else "windows"
    if learner.train_on == "groups":
        room, units = learner.batch_trajectories // learner.group_size, "groups"
    for objective in objectives_of(algorithm):
        name, updates = objective.name, objective.updates_per_batch
        if updates > max(1, room):
            yield f"{name}.updates_per_batch is {updates} but a batch has only {room} {units}; lower it"
