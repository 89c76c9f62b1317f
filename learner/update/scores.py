"""Scores of a batch's tokens, computed before the first optimizer step on it, without gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from learner.algorithm_config import AlgorithmConfig
from learner.algorithms.clipping import entropy_signal
from learner.algorithms.ratios import segment_ratio
from learner.surrogate_config import EntropySurrogate
from learner.update.adaptive import has_group_ratio, needs_scores
from learner.update.batching import Batch, MicroBatch
from learner.update.frozen import FrozenPolicy
from learner.update.outcome import TokenRecorder
from learner.update.policy import Outputs

Forward = Callable[[MicroBatch], Outputs]
"""Function that returns the policy's outputs for a micro-batch. It is a collective call, which all ranks make
in the same order."""


@dataclass(frozen=True)
class Scores:
    """Scores of the targets of one micro-batch, [N] each; None where the objective does not need them."""

    logp_proximal: Tensor | None = None
    entropy_signal: Tensor | None = None
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
    ranks: int,
    device: torch.device,
) -> list[list[Scores]]:
    """Score every micro-batch of every mini-batch. This is a collective call."""
    own = needs_scores(algorithm, len(mini_batches))
    outputs = [[forward(m) if own else None for m in part] for part in mini_batches]
    signal = group_ratio = None
    surrogate = algorithm.surrogate
    if isinstance(surrogate, EntropySurrogate):
        entropy = _gather_row("entropy", batch, mini_batches, outputs, ranks)
        signal = _entropy_signal(batch, entropy, quantile=surrogate.quantile)
    if has_group_ratio(algorithm):
        logp = _gather_row("logp_current", batch, mini_batches, outputs, ranks)
        group_ratio = _group_ratio(batch, logp)
    logp_frozen = {name: [policy.score(part) for part in mini_batches] for name, policy in frozen.items()}

    def of(micro_batch: MicroBatch, values: Tensor | None) -> Tensor | None:
        return None if values is None else values[np.maximum(micro_batch.token, 0)].to(device)

    return [
        [
            Scores(
                logp_proximal=None if output is None else output.logp,
                entropy_signal=of(micro_batch, signal),
                logp_reference=logp_frozen["reference"][i][j] if "reference" in frozen else None,
                logp_predecessor=logp_frozen["predecessor"][i][j] if "predecessor" in frozen else None,
                group_ratio=of(micro_batch, group_ratio),
            )
            for j, (output, micro_batch) in enumerate(zip(outputs[i], mini_batches[i], strict=True))
        ]
        for i in range(len(mini_batches))
    ]


def _gather_row(
    row: Literal["entropy", "logp_current"],
    batch: Batch,
    mini_batches: Sequence[Sequence[MicroBatch]],
    outputs: Sequence[Sequence[Outputs | None]],
    ranks: int,
) -> Tensor:
    """Gather one row of the outputs for the batch's seen tokens [M], from all ranks."""
    recorder = TokenRecorder(int(batch.seen_mask.sum()), ranks)
    for part, said in zip(mini_batches, outputs, strict=True):
        for micro_batch, output in zip(part, said, strict=True):
            if output is not None:
                recorder.put(micro_batch, {"entropy": output.entropy, "logp_current": output.logp})
    return torch.from_numpy(recorder.gathered(row)[row])


def _entropy_signal(batch: Batch, entropy: Tensor, *, quantile: float) -> Tensor:
    """Compute the entropy signal of the seen tokens [M]; 0 where there is no policy gradient."""
    policy, signal = torch.from_numpy(batch.loss_mask[batch.seen_mask]), torch.zeros_like(entropy)
    signal[policy] = entropy_signal(entropy[policy], quantile=quantile)
    return signal


def _group_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """Compute the ratio proximal / behaviour of each seen token's rollout group, [M].

    The mean is over the tokens with policy gradient of all answers of a group; other tokens get 1.
    """
    seen, group = batch.seen_mask, np.repeat(batch.group, batch.lengths)
    policy, ratio = torch.from_numpy(batch.loss_mask[seen]), torch.ones_like(logp)
    behaviour = torch.from_numpy(batch.columns["logp_behaviour"][batch.loss_mask])
    ratio[policy] = segment_ratio(logp[policy], behaviour, torch.from_numpy(group[batch.loss_mask]).long())
    return ratio
