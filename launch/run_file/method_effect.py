"""Settings of `[learner]` that have no effect, or an effect that nobody wants.

A setting that a user must have chosen is a mistake, because no recipe has it. What the defaults have, too, is a
note. Each line has field, value seen and cure.
"""

from collections.abc import Iterator

from launch.run_file.family_rules import family_notes
from launch.run_file.objectives import ChangedObjective, objectives_of
from learner.settings.algorithm import (
    AlgorithmConfig,
    BalancedSurrogate,
    ChunkSurrogate,
    ClipSurrogate,
    EntropySurrogate,
    KlPenalty,
    LagSurrogate,
    MiniRlSurrogate,
    MirrorDescentSurrogate,
    RatioVarianceSurrogate,
    TripletSurrogate,
    WeightedSurrogate,
)
from learner.settings.learner import LearnerConfig

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
