"""The frozen average of the policy, and what it says of failures behind solved siblings (SRPO, arXiv:2604.02288).

The context is made of tokens: the solved sibling as it was sampled, and behind it the failure, its prompt included.
So no chat template is needed, and both stand there as the policy knows them.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.regularisers import sibling_weights
from learner.settings.siblings import SiblingDistillation
from learner.trajectory import Trajectory
from learner.update.batch import Batch
from learner.update.micro_batches import CutRule, MicroBatch, make_micro_batches
from learner.update.policy import FrozenPolicy

NOBODY = -1
"""Sibling of a trajectory that learns from its rewards."""


def solved_siblings(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """Return for each trajectory the place of the sibling that it learns from, [S]; `NOBODY` for all others.

    Failures that the policy sampled have one if any member of their group is right: the first of them. A trajectory
    with several conversations has none and is none, because no single context has all its tokens.

    Example:
        >>> from tests.trajectories import make_trajectory
        >>> of = [make_trajectory(f"g.{n}", group="g", reward=r) for n, r in enumerate((0.0, 1.0, 0.0, 0.0))]
        >>> solved_siblings(of).tolist(), solved_siblings(of[2:]).tolist()
        ([1, -1, 1, 1], [-1, -1])
    """
    plain = [t.origin == "own" and not t.unused and not t.lane and t.branch_count == 1 for t in trajectories]
    first: dict[str, int] = {}
    for place, t in enumerate(trajectories):
        if plain[place] and t.solved:
            first.setdefault(t.group_id, place)
    found = [
        first.get(t.group_id, NOBODY) if own and not t.solved else NOBODY
        for own, t in zip(plain, trajectories, strict=True)
    ]
    return np.array(found, dtype=np.int64)


def behind_siblings(batch: Batch) -> tuple[Batch, NDArray[np.int64]] | None:
    """Return the failures of a batch behind their siblings, and the place in the batch of each token that is seen.

    None if no trained token has a sibling.
    """
    starts = batch.starts
    sibling = np.full(len(batch.lengths), NOBODY, dtype=np.int64)
    filled = np.flatnonzero(batch.lengths)
    sibling[filled] = batch.columns["sibling"][starts[filled]]
    learners = np.flatnonzero((sibling >= 0) & (batch.trained > 0))
    if not learners.size:
        return None
    spans = [
        (np.arange(starts[s], starts[s + 1]), np.arange(starts[i], starts[i + 1]))
        for i, s in zip(learners, sibling[learners], strict=True)
    ]
    read, own = [span for span, _ in spans], [span for _, span in spans]
    places = np.concatenate([span for pair in zip(read, own, strict=True) for span in pair])
    mine = np.concatenate([np.repeat([False, True], [len(a), len(b)]) for a, b in spans])
    seen = batch.loss_mask[places] & mine
    zeros = np.zeros(len(places), dtype=np.float32)
    whole = Batch(
        lengths=np.array([len(a) + len(b) for a, b in spans], dtype=np.int32),
        temperature=batch.temperature[learners],
        group=np.arange(len(learners), dtype=np.int32),
        token_ids=batch.token_ids[places],
        loss_mask=seen,
        seen_mask=seen,
        columns=dict.fromkeys(batch.columns, zeros),
        version=batch.version,
    )
    return whole, places[seen]


class AveragePolicy(FrozenPolicy):
    """An exponential average of the policy's weights, which reads a solved sibling before it judges a failure."""

    @torch.no_grad()
    def approach(self, weights: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Take a share of new weights into the average: see `learner.update.ranks.trained_weights`."""
        own = dict(self._module.lm.named_parameters()) | dict(self._module.lm.named_buffers())
        for name, tensor in weights:
            own[name].lerp_(tensor.to(own[name].device, own[name].dtype), share)

    @torch.no_grad()
    def teach(
        self,
        batch: Batch,
        micro_batches: Sequence[MicroBatch],
        config: SiblingDistillation,
        *,
        budget: int,
        rule: CutRule,
    ) -> dict[str, list[Tensor]]:
        """Return the rows ``logp_average`` and ``sibling_weight`` of micro-batches; a weight is 0 without a sibling.

        Each rank computes all of them, so that the mean of the weights is over the whole batch without a collective.

        Args:
            budget: largest number of positions of a pass.
            rule: how much padding is accepted to save a pass.
        """
        logp, weight = torch.zeros(len(batch.token_ids)), torch.zeros(len(batch.token_ids))
        if (behind := behind_siblings(batch)) is not None:
            whole, places = behind
            passes = make_micro_batches(
                whole, np.arange(len(whole.lengths)), aggregation="token_mean", budget=budget, rule=rule
            )
            entropy = torch.zeros(len(places))
            for each in passes:
                outputs = self.outputs(each)
                logp[places[each.token]] = outputs.logp.float().cpu()
                entropy[each.token] = outputs.entropy.float().cpu()
            weight[places] = sibling_weights(entropy, beta=config.beta)
        seen = np.flatnonzero(batch.seen_mask)
        wanted = [seen[np.maximum(m.token, 0)] for m in micro_batches]
        return {
            name: [table[place].to(self._device) for place in wanted]
            for name, table in (("logp_average", logp), ("sibling_weight", weight))
        }
