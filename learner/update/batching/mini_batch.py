"""Mini-batches: the tokens of one optimizer step each, in every pass over a batch."""

from collections.abc import Callable
from dataclasses import dataclass

from learner.update.batching.batch import Batch
from learner.update.batching.micro_batch import MicroBatch
from learner.update.batching.packing import deal_mini_batches
from protocol.arrays import Int64s


@dataclass(frozen=True)
class MiniBatch:
    """Tokens of one optimizer step. All ranks agree whether there is anything to learn from them."""

    pass_index: int
    """Pass over the batch to which the mini-batch belongs."""
    micro_batches: list[MicroBatch]
    """Micro-batches of this rank."""
    policy: bool
    """True if some tokens carry policy gradient or are imitated."""
    values: bool
    """True if the critic learns from some tokens."""


def make_mini_batches(
    batch: Batch, cut: Callable[[Int64s], list[MicroBatch]], *, passes: int, parts: int, seed: list[int]
) -> list[MiniBatch]:
    """Deal the trajectories of a batch to the mini-batches of all passes. Empty ones are left out.

    Args:
        batch: trajectories.
        cut: returns this rank's micro-batches of these trajectories.
        passes: passes over the batch.
        parts: mini-batches of a pass, at most.
        seed: seed of the dealing; the number of the pass is added.
    """
    valued, imitated = batch.columns["value_mask"] > 0, batch.columns["imitation_mask"] > 0
    members = [
        (pass_index, part)
        for pass_index in range(passes)
        for part in deal_mini_batches(len(batch.lengths), parts, [*seed, pass_index])
    ]
    return [
        MiniBatch(
            pass_index,
            micro_batches,
            policy=bool((batch.trained + batch.count(imitated))[part].any()),
            values=bool(batch.count(valued)[part].any()),
        )
        for pass_index, part in members
        if (micro_batches := cut(part))
    ]
