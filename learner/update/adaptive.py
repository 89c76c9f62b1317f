"""Numbers of the objective that depend on the step or on the batch; they are known before an optimizer step.

First, settings that change from step to step: objective, dual variables, coefficients, learning rate. These functions
are pure; the state is a few numbers, and the checkpoint contains it. Then scores of a batch by the weights before the
update, the tokens of a micro-batch, and the clip bounds of a mini-batch (BAPO).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from learner.advantages import Quantiles
from learner.algorithms.baselines import balance_excess, optimal_baseline, score_square
from learner.algorithms.entropy import covariance_mask, entropy_multiplier, entropy_signal
from learner.algorithms.penalties import mirror_step_size, next_dual
from learner.algorithms.ratios import LOG_RATIO_LIMIT, importance_ratio, segment_ratio
from learner.algorithms.regularisers import band_weight, base_share, next_entropy_coefficient
from learner.algorithms.surrogates import BalancedBounds, balance_path, balance_sums, choose_bounds
from learner.algorithms.trust_regions import moves_away, second_moment_cap, second_moment_cut
from learner.settings.algorithm import AlgorithmConfig, CovarianceMask, KlConvex
from learner.settings.learner import OptimizerConfig
from learner.settings.surrogates import RatioVarianceSurrogate, SecondMomentSurrogate, TailSurrogate
from learner.update.batch import Batch
from learner.update.micro_batches import MicroBatch
from learner.update.objective import Adaptive, Tokens, View, make_corrections, proximal_logp
from learner.update.policy import FrozenPolicy, Outputs
from learner.update.ranks import sum_over_ranks
from learner.update.teacher import RemoteTeacher


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
        >>> from learner.settings.surrogates import WindowSurrogate
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
    threshold: float = math.inf,
) -> Adaptive:
    """Return the numbers for one optimizer step of learner step ``step`` (from 0) out of ``steps``.

    Args:
        version: policy version that the step updates.
        threshold: from `step_threshold`.
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
        threshold=threshold,
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
    if config.optimal_baseline or config.balances_trajectories:
        return True
    return optimizer_steps > 1 and (config.proximal == "recomputed" or config.routes == "proximal")


def has_group_ratio(config: AlgorithmConfig) -> bool:
    """Return whether a token's weight depends on the tokens of other answers."""
    return any(correction.level == "group" for correction in config.corrections)


AVERAGE = "average"
"""Name of the frozen average of the policy, which reads a solved sibling before it judges a failure."""


def reference_policies(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return the names of the policies that the objective compares with: frozen copies of the model, and a teacher."""
    teacher = ("teacher",) if config.distillation is not None else ()
    if config.siblings is not None:
        teacher = (*teacher, AVERAGE)
    if isinstance(config.kl, KlConvex):
        return ("reference", "predecessor", *teacher)
    compared = config.balances_trajectories or (config.kl is not None and config.kl.to == "reference")
    return ("reference", *teacher) if compared else teacher


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


Forward = Callable[[MicroBatch], Outputs]
"""Function that returns the policy's outputs for a micro-batch. It is a collective call, which all ranks make
in the same order."""


@dataclass(frozen=True)
class Scores:
    """Scores of the targets of one micro-batch, [N] each; None where the objective does not need them."""

    logp_proximal: Tensor | None = None
    entropy_signal: Tensor | None = None
    entropy_multiplier: Tensor | None = None
    kept: Tensor | None = None
    logp_reference: Tensor | None = None
    logp_predecessor: Tensor | None = None
    logp_teacher: Tensor | None = None
    logp_average: Tensor | None = None
    sibling_weight: Tensor | None = None
    group_ratio: Tensor | None = None
    baseline: Tensor | None = None
    balance_excess: Tensor | None = None


@torch.no_grad()
def score_mini_batches(
    forward: Forward,
    frozen: Mapping[str, FrozenPolicy | RemoteTeacher],
    batch: Batch,
    mini_batches: Sequence[Sequence[MicroBatch]],
    algorithm: AlgorithmConfig,
    *,
    first_pass: int,
    ranks: int,
    device: torch.device,
    taught: Callable[[Sequence[MicroBatch]], dict[str, list[Tensor]]] = lambda _: {},
) -> list[list[Scores]]:
    """Score every micro-batch of every mini-batch. This is a collective call.

    All passes have the same tokens, and the scores are those before the first optimizer step. So the models
    run on the first pass only, and the micro-batches of later passes look their tokens up.

    Args:
        mini_batches: micro-batches of this rank for each mini-batch of all passes, in order.
        first_pass: number of mini-batches of the first pass, which together have each seen token once.
        taught: returns further rows of micro-batches, from the average of the policy.
    """
    if not mini_batches:
        return []
    first = [micro_batch for part in mini_batches[:first_pass] for micro_batch in part]
    every = [micro_batch for part in mini_batches for micro_batch in part]
    again = len(mini_batches) > first_pass
    rows = {f"logp_{name}": policy.score(batch, first) for name, policy in frozen.items() if name != AVERAGE}
    rows |= taught(first)
    compared: dict[str, list[Tensor]] = {}
    if needs_scores(algorithm, len(mini_batches)):
        outputs = [forward(micro_batch) for micro_batch in first]
        rows["logp_proximal"] = [output.logp for output in outputs]
        compared = _compared_rows(algorithm, outputs)
        if algorithm.balances_trajectories:
            compared["logp_reference"] = rows["logp_reference"]
    tokens = _gather(first, compared | rows if again else compared, batch, ranks)
    table = _compare(batch, tokens, algorithm)
    if again:
        table |= {name: tokens[name] for name in rows}
        rows = {}
    scores = [
        Scores(
            **{name: values[i] for name, values in rows.items()},
            **{name: values[np.maximum(micro_batch.token, 0)].to(device) for name, values in table.items()},
        )
        for i, micro_batch in enumerate(every)
    ]
    in_order = iter(scores)
    return [[next(in_order) for _ in part] for part in mini_batches]


def _compared_rows(algorithm: AlgorithmConfig, outputs: Sequence[Outputs]) -> dict[str, list[Tensor]]:
    """Return the rows of outputs that must be compared over all tokens of the batch."""
    rows = {}
    if algorithm.compares_entropies:
        rows["entropy"] = [output.entropy for output in outputs]
    whole = algorithm.optimal_baseline or algorithm.balances_trajectories
    if whole or has_group_ratio(algorithm) or algorithm.covariance is not None:
        rows["logp_proximal"] = [output.logp for output in outputs]
    return rows


def _gather(
    micro_batches: Sequence[MicroBatch], rows: Mapping[str, Sequence[Tensor]], batch: Batch, ranks: int
) -> dict[str, Tensor]:
    """Gather rows of the micro-batches' targets for the batch's seen tokens [M], from all ranks.

    Each token must be a target once, on one rank. This is a collective call, unless there are no rows.
    """
    if not rows:
        return {}
    gathered = torch.zeros(len(rows), int(batch.seen_mask.sum()))
    for i, micro_batch in enumerate(micro_batches):
        # A dummy has no token.
        if micro_batch.token[0] >= 0:
            gathered[:, micro_batch.token] = torch.stack(
                [values[i].float() for values in rows.values()]
            ).cpu()
    return dict(zip(rows, sum_over_ranks(gathered, ranks), strict=True))


def _compare(batch: Batch, tokens: Mapping[str, Tensor], algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """Compute the scores [M] that compare a token with other tokens of the batch."""
    scores = {}
    if (clip := algorithm.entropy_clip) is not None:
        scores["entropy_signal"] = _entropy_signal(batch, tokens["entropy"], quantile=clip.quantile)
    if coefficient := algorithm.advantage_by_entropy:
        policy = torch.from_numpy(batch.loss_mask[batch.seen_mask])
        factors = torch.ones_like(tokens["entropy"])
        factors[policy] = entropy_multiplier(tokens["entropy"][policy], coefficient=coefficient)
        scores["entropy_multiplier"] = factors
    if algorithm.covariance is not None:
        scores["kept"] = _kept(batch, tokens["logp_proximal"], algorithm.covariance)
    if has_group_ratio(algorithm):
        scores["group_ratio"] = _group_ratio(batch, tokens["logp_proximal"])
    if algorithm.optimal_baseline:
        scores["baseline"] = _baseline(batch, tokens["logp_proximal"])
    if algorithm.balances_trajectories:
        difference = (tokens["logp_proximal"] - tokens["logp_reference"]).double().numpy()
        trained = batch.trained > 0
        excess = np.zeros(len(batch.lengths))
        excess[trained] = balance_excess(_sums(batch, difference)[trained], batch.group[trained])
        scores["balance_excess"] = _of_tokens(batch, excess)
    return scores


def _rows(batch: Batch) -> NDArray[np.int64]:
    """Return the trajectory of each seen token, [M]."""
    return np.repeat(np.arange(len(batch.lengths)), batch.lengths)[batch.seen_mask]


def _sums(batch: Batch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add up values of seen tokens [M] over the tokens with policy gradient of each trajectory, [S]."""
    policy = batch.loss_mask[batch.seen_mask]
    sums = np.bincount(_rows(batch)[policy], weights=values[policy], minlength=len(batch.lengths))
    return sums.astype(np.float64)


def _of_tokens(batch: Batch, values: NDArray[np.float64]) -> Tensor:
    """Give each seen token the value of its trajectory, float32 [M]."""
    return torch.from_numpy(values[_rows(batch)]).float()


def _baseline(batch: Batch, logp: Tensor) -> Tensor:
    """Compute the optimal baseline of each seen token's rollout group, [M]."""
    seen = batch.seen_mask
    proximal, behaviour = logp.double().numpy(), batch.columns["logp_behaviour"][seen].astype(np.float64)
    log_weights = np.clip(_sums(batch, proximal - behaviour), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    scores = _sums(batch, score_square(np.exp(np.minimum(proximal, 0.0))))
    advantages = _sums(batch, batch.columns["advantage"][seen].astype(np.float64)) / np.maximum(
        1, batch.trained
    )
    return _of_tokens(batch, optimal_baseline(advantages, np.exp(log_weights), scores, batch.group))


def _entropy_signal(batch: Batch, entropy: Tensor, *, quantile: float) -> Tensor:
    """Compute the entropy signal of the seen tokens [M]; 0 where there is no policy gradient."""
    policy, signal = torch.from_numpy(batch.loss_mask[batch.seen_mask]), torch.zeros_like(entropy)
    signal[policy] = entropy_signal(entropy[policy], quantile=quantile)
    return signal


def _kept(batch: Batch, logp: Tensor, config: CovarianceMask) -> Tensor:
    """Return 0 for the seen tokens that the mask leaves out, else 1, [M]."""
    policy, kept = torch.from_numpy(batch.loss_mask[batch.seen_mask]), torch.ones_like(logp)
    # Seeded by the tokens, so that all ranks draw alike, and a restart draws again what was drawn.
    rng = np.random.default_rng(int(batch.token_ids.astype(np.int64).sum()))
    chosen = covariance_mask(
        batch.columns["advantage"][batch.loss_mask],
        logp[policy].numpy(),
        low=config.low,
        high=config.high,
        share=config.share,
        rng=rng,
    )
    kept[policy] = torch.from_numpy(chosen).to(kept.dtype)
    return kept


def _group_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """Compute the ratio proximal / behaviour of each seen token's rollout group, [M].

    The mean is over the tokens with policy gradient of all answers of a group; other tokens get 1.
    """
    seen, group = batch.seen_mask, np.repeat(batch.group, batch.lengths)
    policy, ratio = torch.from_numpy(batch.loss_mask[seen]), torch.ones_like(logp)
    behaviour = torch.from_numpy(batch.columns["logp_behaviour"][batch.loss_mask])
    ratio[policy] = segment_ratio(logp[policy], behaviour, torch.from_numpy(group[batch.loss_mask]).long())
    return ratio


Chosen = Tensor | slice
"""Index that selects targets of a micro-batch."""


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    return torch.from_numpy(array).to(device)


def columns_on_device(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of a micro-batch as tensors on a device, [N] each."""
    return {name: on_device(column, device) for name, column in micro_batch.columns.items()}


def policy_targets(micro_batch: MicroBatch, device: torch.device) -> Chosen:
    """Return the index of the targets that carry policy gradient.

    If all targets carry it, the index is a slice, which copies nothing. Else it has numbers and is no mask, because the
    host would wait for a GPU that counts a mask.
    """
    return slice(None) if micro_batch.policy.all() else on_device(np.flatnonzero(micro_batch.policy), device)


def chosen_tokens(
    micro_batch: MicroBatch, columns: dict[str, Tensor], scored: Scores, policy: Chosen
) -> Tokens:
    """Select the tokens of a micro-batch that carry policy gradient.

    Args:
        micro_batch: targets, of which the tokens are a part.
        columns: columns of the micro-batch on the device.
        scored: scores of its targets.
        policy: index of the targets to select, see `policy_targets`.
    """

    def chosen(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[policy]

    turn = columns["turn"].long()
    sequence = torch.from_numpy(micro_batch.sequence).to(turn.device)
    return Tokens(
        logp_behaviour=columns["logp_behaviour"][policy],
        advantage=columns["advantage"][policy],
        weight=columns["weight"][policy],
        lag=columns["lag"][policy],
        sequence=sequence[policy],
        turn=(sequence * (turn.max() + 2) + turn + 1)[policy],
        logp_proximal=chosen(scored.logp_proximal),
        median_advantage=columns["median_advantage"][policy],
        entropy_signal=chosen(scored.entropy_signal),
        entropy_multiplier=chosen(scored.entropy_multiplier),
        kept=chosen(scored.kept),
        logp_reference=chosen(scored.logp_reference),
        logp_predecessor=chosen(scored.logp_predecessor),
        logp_teacher=chosen(scored.logp_teacher),
        logp_average=chosen(scored.logp_average),
        sibling_weight=chosen(scored.sibling_weight),
        group_ratio=chosen(scored.group_ratio),
        baseline=chosen(scored.baseline),
        balance_excess=chosen(scored.balance_excess),
        group=columns["group"][policy].long(),
        length=columns["length"][policy],
        lane=columns["lane"][policy] > 0 if "lane" in columns else None,
        foreign=columns["foreign"][policy] > 0 if "foreign" in columns else None,
        loss_number=columns["loss_number"][policy].long() if "loss_number" in columns else None,
    )


@torch.no_grad()
def balanced_bounds(
    forward: Forward,
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    algorithm: AlgorithmConfig,
    *,
    ranks: int,
    device: torch.device,
    version: int = 0,
) -> BalancedBounds | None:
    """Choose clip bounds for the mini-batch under the present weights. Every rank chooses the same.

    This is a collective call. Without a `BalancedSurrogate` there is nothing to choose, and the result is None.
    """
    surrogate = algorithm.balanced
    if surrogate is None:
        return None
    path = balance_path(
        low=(surrogate.low_start, surrogate.low_stop),
        high=(surrogate.high_start, surrogate.high_stop),
        low_step=surrogate.low_step,
        high_step=surrogate.high_step,
        order=surrogate.order,
    )
    correct = make_corrections(algorithm.corrections)
    sums = torch.zeros(len(path), 2, dtype=torch.float64)
    for micro_batch, scored in zip(micro_batches, scores, strict=True):
        # Invariant: all ranks make the same forward calls, because these are collective. A dummy runs, too.
        current = forward(micro_batch).logp
        if micro_batch.token[0] < 0:
            continue
        policy = policy_targets(micro_batch, device)
        columns = columns_on_device(micro_batch, device)
        tokens = chosen_tokens(micro_batch, columns, scored, policy)
        proximal = proximal_logp(algorithm, tokens, current[policy])
        centre = tokens.logp_behaviour if surrogate.centre == "behaviour" else proximal
        weight = correct(View(tokens, Adaptive(version=version), current[policy], proximal)).weight
        if surrogate.weight == "behaviour_probability":
            weight = weight * tokens.logp_behaviour.exp()
        ratio = importance_ratio(current[policy], centre)
        sums += balance_sums(ratio, tokens.advantage, weight, path, measure=surrogate.measure).cpu()
    return choose_bounds(sum_over_ranks(sums, ranks), path, target=surrogate.target)


@torch.no_grad()
def step_threshold(
    forward: Forward,
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    algorithm: AlgorithmConfig,
    batch: Batch,
    *,
    ranks: int,
    device: torch.device,
) -> float:
    """Choose the number by which a surrogate bounds the tokens of an optimizer step, under the present weights.

    It is the largest (log ratio)² or the cap of |log ratio| of M2PO, or the quantile of SAT. Every rank chooses the
    same. This is a collective call. Infinity if the surrogate asks for none.
    """
    surrogate = algorithm.step_bounded
    if surrogate is None:
        return math.inf
    # Distances are shifted by 1, so that 0 stands for a token that does not count.
    found = torch.zeros(int(batch.seen_mask.sum()), dtype=torch.float64)
    for micro_batch, scored in zip(micro_batches, scores, strict=True):
        # Invariant: all ranks make the same forward calls, because these are collective. A dummy runs, too.
        current = forward(micro_batch).logp
        if micro_batch.token[0] < 0 or not micro_batch.policy.any():
            continue
        policy = policy_targets(micro_batch, device)
        tokens = chosen_tokens(micro_batch, columns_on_device(micro_batch, device), scored, policy)
        log_ratio = (current[policy] - tokens.logp_behaviour).double()
        counts = torch.ones_like(log_ratio, dtype=torch.bool)
        if isinstance(surrogate, SecondMomentSurrogate):
            counts = moves_away(log_ratio.exp(), tokens.advantage)
        row = torch.from_numpy(micro_batch.token[micro_batch.policy])
        found[row] = torch.where(counts, log_ratio.abs() + 1, 0.0).cpu()
    found = sum_over_ranks(found, ranks)
    distances = found[found > 0] - 1
    if isinstance(surrogate, TailSurrogate):
        return float(torch.quantile(distances, surrogate.quantile)) if len(distances) else 0.0
    if surrogate.form == "mask":
        return second_moment_cut(distances.square(), budget=surrogate.budget)
    return second_moment_cap(distances.square(), budget=surrogate.budget)
