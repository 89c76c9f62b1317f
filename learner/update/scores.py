"""Scores that the objective must have of tokens before an optimizer step.

Scores of a batch by the weights before the update, the tokens of a micro-batch, and the clip bounds of a mini-batch
(BAPO).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.entropy import covariance_mask, entropy_multiplier, entropy_signal
from learner.algorithms.ratios import importance_ratio, segment_ratio
from learner.algorithms.surrogates import BalancedBounds, balance_path, balance_sums, choose_bounds
from learner.settings.algorithm import AlgorithmConfig, CovarianceMask
from learner.update.adaptive import has_group_ratio, needs_scores
from learner.update.batch import Batch
from learner.update.deepspeed_zero import sum_over_ranks
from learner.update.micro_batches import MicroBatch
from learner.update.objective import Adaptive, Tokens, View, make_corrections, proximal_logp
from learner.update.policy import FrozenPolicy, Outputs

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
    group_ratio: Tensor | None = None


@torch.no_grad()
def score_mini_batches(
    forward: Forward,
    frozen: Mapping[str, FrozenPolicy],
    batch: Batch,
    mini_batches: Sequence[Sequence[MicroBatch]],
    algorithm: AlgorithmConfig,
    *,
    first_pass: int,
    ranks: int,
    device: torch.device,
) -> list[list[Scores]]:
    """Score every micro-batch of every mini-batch. This is a collective call.

    All passes have the same tokens, and the scores are those before the first optimizer step. So the models
    run on the first pass only, and the micro-batches of later passes look their tokens up.

    Args:
        mini_batches: micro-batches of this rank for each mini-batch of all passes, in order.
        first_pass: number of mini-batches of the first pass, which together have each seen token once.
    """
    if not mini_batches:
        return []
    first = [micro_batch for part in mini_batches[:first_pass] for micro_batch in part]
    every = [micro_batch for part in mini_batches for micro_batch in part]
    again = len(mini_batches) > first_pass
    rows = {f"logp_{name}": policy.score(batch, first) for name, policy in frozen.items()}
    compared: dict[str, list[Tensor]] = {}
    if needs_scores(algorithm, len(mini_batches)):
        outputs = [forward(micro_batch) for micro_batch in first]
        rows["logp_proximal"] = [output.logp for output in outputs]
        compared = _compared_rows(algorithm, outputs)
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
    if has_group_ratio(algorithm) or algorithm.covariance is not None:
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
    return scores


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
        group_ratio=chosen(scored.group_ratio),
        group=columns["group"][policy].long(),
        length=columns["length"][policy],
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
