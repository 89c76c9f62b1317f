"""Settings that change from step to step: objective, dual variables, coefficients, learning rate.

All functions are pure. The state is a few numbers, and the checkpoint contains it.
"""

import math
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from learner.advantages import Quantiles
from learner.algorithms.penalties import mirror_step_size, next_dual
from learner.algorithms.regularisers import band_weight, base_share, next_entropy_coefficient
from learner.algorithms.surrogates import BalancedBounds
from learner.settings.algorithm import (
    AlgorithmConfig,
    KlConvex,
    RatioVarianceSurrogate,
)
from learner.settings.learner import OptimizerConfig
from learner.update.objective import Adaptive


class AdaptiveState(Struct, frozen=True, kw_only=True):
    """Numbers that each step passes on to the next step."""

    dual: float
    entropy_coefficient: float
    entropy_sum: float = 0.0
    """Sum of the mean entropies of all earlier updates, in nats."""
    entropy_updates: int = 0
    quantiles: Quantiles | None = None
    """Running quantiles of RiskPO's sums, on rank 0; None before the first step, and in other methods."""


def first_state(config: AlgorithmConfig) -> AdaptiveState:
    """Return the state with which a run begins."""
    dual = config.ratio_variance.dual_start if config.ratio_variance is not None else 0.0
    return AdaptiveState(dual=dual, entropy_coefficient=config.entropy.coefficient)


def state_at(config: AlgorithmConfig, state: AdaptiveState, step: int) -> AdaptiveState:
    """Return the state with which a learner step begins. A reincarnation restarts the dual variable."""
    change = config.reincarnation
    if change is None or step != change.step:
        return state
    surrogate = change.surrogate
    dual = surrogate.dual_start if isinstance(surrogate, RatioVarianceSurrogate) else 0.0
    return replace(state, dual=dual)


def algorithm_at(config: AlgorithmConfig, step: int) -> AlgorithmConfig:
    """Return the objective in force at a learner step. A reincarnated run changes it once.

    Example:
        >>> from learner.settings.algorithm import Reincarnation
        >>> from learner.settings.algorithm import WindowSurrogate
        >>> c = AlgorithmConfig(surrogate=WindowSurrogate(), reincarnation=Reincarnation(step=50))
        >>> algorithm_at(c, 49).surrogate.kind, algorithm_at(c, 50).surrogate.kind
        ('window', 'clip')
    """
    change = config.reincarnation
    if change is None or step < change.step:
        return config
    return config.model_copy(
        update={
            "surrogate": change.surrogate,
            "corrections": change.corrections,
            "updates_per_batch": change.updates_per_batch,
            "passes": change.passes,
        }
    )


def adaptive(
    config: AlgorithmConfig,
    state: AdaptiveState,
    *,
    step: int,
    steps: int,
    bounds: BalancedBounds | None,
    version: int = 0,
) -> Adaptive:
    """Return the numbers for one optimizer step of learner step ``step`` (from 0) out of ``steps``.

    Args:
        version: policy version that the step updates.
    """
    kl = config.kl
    share = 1.0
    if isinstance(kl, KlConvex):
        share = base_share(step, hold=kl.hold, every=kl.every, drop=kl.drop, floor=kl.floor)
    band, known = config.entropy.band, state.entropy_updates
    outside = 0.0
    if band is not None and known:
        weight = band_weight(step, steps, growth=band.growth)
        outside = state.entropy_coefficient * weight * band.coefficient
    return Adaptive(
        clip_low=bounds.low if bounds else 0.8,
        clip_high=bounds.high if bounds else 1.2,
        dual=state.dual,
        entropy_coefficient=state.entropy_coefficient,
        base_share=share,
        mirror_step=mirror_step_size(min(step, steps - 1) + 1, steps) if config.descends_mirror else 1.0,
        entropy_mean=state.entropy_sum / known if known else 0.0,
        band_coefficient=outside,
        version=version,
    )


def after_optimizer_step(
    surrogate: RatioVarianceSurrogate, state: AdaptiveState, *, mean_square: float
) -> AdaptiveState:
    """Update the dual variable with the mean of (ratio - 1)² over the step's tokens on all ranks."""
    dual = next_dual(
        state.dual,
        mean_square,
        bound=surrogate.bound,
        rate=surrogate.dual_rate,
        ceiling=surrogate.dual_ceiling,
    )
    return replace(state, dual=dual)


def after_update(config: AlgorithmConfig, state: AdaptiveState, *, entropy: float) -> AdaptiveState:
    """Note the mean entropy (nats) of the update's tokens, and steer the entropy coefficient by it."""
    bonus = config.entropy
    if bonus.band is not None:
        entropies, updates = state.entropy_sum + entropy, state.entropy_updates + 1
        state = replace(state, entropy_sum=entropies, entropy_updates=updates)
    if not bonus.target:
        return state
    coefficient = next_entropy_coefficient(
        state.entropy_coefficient, entropy, target=bonus.target, change=bonus.change, maximum=bonus.maximum
    )
    return replace(state, entropy_coefficient=coefficient)


def has_entropy_gradient(config: AlgorithmConfig) -> bool:
    """Return whether the objective may need gradient through the entropy."""
    return config.entropy.coefficient > 0 or config.entropy.target > 0


def optimizer_steps_per_update(config: AlgorithmConfig) -> int:
    """Return the largest number of optimizer steps on one batch."""
    return config.updates_per_batch * config.passes


def total_optimizer_steps(config: AlgorithmConfig, steps: int) -> int:
    """Return the optimizer steps of a run of ``steps`` learner steps, a reincarnation included."""
    change = config.reincarnation
    before = steps if change is None else min(steps, change.step)
    after = algorithm_at(config, before) if before < steps else config
    return before * optimizer_steps_per_update(config) + (steps - before) * optimizer_steps_per_update(after)


def needs_scores(config: AlgorithmConfig, optimizer_steps: int) -> bool:
    """Return whether the weights before the update must score all tokens first.

    Entropies of the batch and group ratios compare a token with others, so they always need the scores. The
    recomputed proximal policy needs them only for several optimizer steps: with a single step it is the
    current policy, and the forward pass of the update is enough. The same holds for replayed routes.
    """
    if config.compares_entropies or config.covariance is not None or has_group_ratio(config):
        return True
    return optimizer_steps > 1 and (config.proximal == "recomputed" or config.routes == "proximal")


def has_group_ratio(config: AlgorithmConfig) -> bool:
    """Return whether a token's weight depends on the tokens of other answers."""
    return any(correction.level == "group" for correction in config.corrections)


def reference_policies(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return the names of the frozen copies of the model that the objective compares with."""
    if isinstance(config.kl, KlConvex):
        return ("reference", "predecessor")
    return ("reference",) if config.kl is not None and config.kl.to == "reference" else ()


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    The rate rises linearly over ``warmup_steps``. Then it stays constant, or falls to zero at
    ``total_steps``, linearly or as half a cosine.

    Example:
        >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear")
        >>> [learning_rate(config, step, total_steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 - progress)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(config.schedule)


def learning_rates(
    algorithm: AlgorithmConfig, optimizer: OptimizerConfig, done: int, *, steps: int, warming_up: bool
) -> tuple[float, float]:
    """Return the learning rates of the policy and of the critic.

    The policy's schedule begins when the policy begins to learn.

    Args:
        algorithm: for the critic.
        optimizer: the schedule.
        done: optimizer steps of the policy's engine so far.
        steps: learner steps of the whole run.
        warming_up: whether only the critic learns in this step.
    """
    critic_only = 0
    if algorithm.critic is not None and algorithm.critic.model == "head":
        critic_only = algorithm.critic.warmup_steps * optimizer_steps_per_update(algorithm)
    total = total_optimizer_steps(algorithm, steps)
    lr = learning_rate(optimizer, max(0, done - critic_only), max(1, total - critic_only))
    if algorithm.critic is None:
        return lr, 0.0
    progress = learning_rate(optimizer, done, total) / optimizer.lr
    return lr, algorithm.critic.lr * (1.0 if warming_up else progress)
