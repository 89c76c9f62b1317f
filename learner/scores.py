"""What is asked about a batch's tokens before the first optimizer step on it, without gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from learner.adaptive import needs_scores
from learner.algorithm_config import AlgorithmConfig
from learner.algorithms.clipping import entropy_signal
from learner.batching import Batch, MicroBatch
from learner.outcome import Recorder
from learner.surrogate_config import EntropySurrogate

if TYPE_CHECKING:
    from learner.update import Updater


@dataclass(frozen=True)
class Scores:
    """Of the targets of one micro-batch, [N] each; None where the objective does not ask for it."""

    logp_proximal: Tensor | None = None
    entropy_signal: Tensor | None = None
    logp_reference: Tensor | None = None
    logp_predecessor: Tensor | None = None


@torch.no_grad()
def score_mini_batches(
    updater: "Updater", batch: Batch, mini_batches: Sequence[Sequence[MicroBatch]], algorithm: AlgorithmConfig
) -> list[list[Scores]]:
    """Scores of every micro-batch of every mini-batch; collective."""
    own = needs_scores(algorithm, len(mini_batches))
    outputs = [[updater.forward(m) if own else None for m in part] for part in mini_batches]
    signals: list[list[Tensor | None]] = [[None] * len(part) for part in mini_batches]
    surrogate = algorithm.surrogate
    if isinstance(surrogate, EntropySurrogate):
        recorder = Recorder(int(batch.seen_mask.sum()), updater.ranks)
        for part, known in zip(mini_batches, outputs, strict=True):
            for micro_batch, output in zip(part, known, strict=True):
                if output is not None:
                    recorder.put(micro_batch, {"entropy": output.entropy})
        entropies = torch.from_numpy(recorder.gathered("entropy")["entropy"])
        policy = torch.from_numpy(batch.loss_mask[batch.seen_mask])
        signal = torch.zeros_like(entropies)
        signal[policy] = entropy_signal(entropies[policy], quantile=surrogate.quantile)
        signals = [[signal[np.maximum(m.token, 0)].to(updater.device) for m in part] for part in mini_batches]
    frozen = {name: [policy.score(part) for part in mini_batches] for name, policy in updater.frozen.items()}
    return [
        [
            Scores(
                logp_proximal=None if output is None else output.logp,
                entropy_signal=signal,
                logp_reference=frozen["reference"][i][j] if "reference" in frozen else None,
                logp_predecessor=frozen["predecessor"][i][j] if "predecessor" in frozen else None,
            )
            for j, (output, signal) in enumerate(zip(outputs[i], signals[i], strict=True))
        ]
        for i in range(len(mini_batches))
    ]
