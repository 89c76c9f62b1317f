"""From trajectories to micro-batches: pure functions of arrays, the same on every rank.

A mini-batch (one optimizer step) is sorted by length and dealt to the ranks in turns, so that all ranks get
nearly the same lengths; then the sorted rows are cut into micro-batches of at most `budget` positions,
where the cuts are chosen to waste the least. The cuts are common to all ranks, so every rank runs equally
many micro-batches, which collectives under ZeRO 3 need; a rank that has no row left runs a dummy of weight
zero.

Rows are padded on the right. Under causal attention nothing ever looks at the padding, so no mask is
needed, and any causal language model gives the same numbers as for one trajectory at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.aggregation import Aggregation, token_weights
from learner.algorithms.staleness import assert_lag_bound, loss_mask
from learner.trajectory import Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

MICRO_BATCH_COST = 128
"""Fixed price of one more micro-batch, in positions, when cuts are chosen."""
PADDING = 0
"""Any token id will do: the padding is never attended to."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Trajectories laid one behind the other; this is what travels to the other ranks."""

    lengths: NDArray[np.int32]
    """[S]"""
    token_ids: NDArray[np.int32]
    """[ΣT], like all that follow but `temperature`"""
    loss_mask: NDArray[np.bool_]
    logp_behaviour: Floats
    advantage: Floats
    temperature: Floats
    """[S]"""

    @property
    def starts(self) -> Ints:
        """Place of the first token of each trajectory, [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def trained(self) -> Ints:
        """Tokens of each trajectory that carry gradient, [S]."""
        sums = np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])
        starts = self.starts
        trained: Ints = sums[starts[1:]] - sums[starts[:-1]]
        return trained


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward and backward pass. B rows of T positions; N targets, counted over all rows."""

    token_ids: Ints
    """[B, T] inputs"""
    position: Ints
    """[N] place b·T + t in the inputs whose output predicts the target"""
    target: Ints
    """[N] token ids"""
    temperature: Floats
    """[N]"""
    logp_behaviour: Floats
    """[N]"""
    advantage: Floats
    """[N]"""
    weight: Floats
    """[N] share in the loss of the mini-batch; 0 in a dummy"""
    token: Ints
    """[N] which of the batch's trained tokens each target is; -1 in a dummy"""
    filled: int
    """Input positions that are not padding."""


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: NDArray[np.floating],
    *,
    current_version: int,
    max_policy_lag: int,
) -> Batch:
    """Lay trajectories out and decide which tokens carry gradient.

    Args:
        advantages: [S], one per trajectory; every token of it gets the same.

    Raises:
        ValueError: a trajectory that can carry gradient was sampled greedily.
        StaleTokens: a version that does not exist yet, or a fault in the mask.
    """
    masks = []
    for t in trajectories:
        mask = loss_mask(
            t.action_mask, t.policy_version, current_version=current_version, max_policy_lag=max_policy_lag
        )
        assert_lag_bound(
            mask,
            t.policy_version,
            current_version=current_version,
            max_policy_lag=max_policy_lag,
            trajectory_id=t.trajectory_id,
        )
        if mask.any() and t.temperature <= 0:
            raise ValueError(
                f"trajectory {t.trajectory_id} was sampled at temperature {t.temperature:g} and has no "
                "behaviour distribution to train against; sample training tasks at a temperature above 0"
            )
        masks.append(mask)
    lengths = np.array([len(t) for t in trajectories], dtype=np.int32)
    return Batch(
        lengths=lengths,
        token_ids=np.concatenate([t.token_ids for t in trajectories]),
        loss_mask=np.concatenate(masks),
        logp_behaviour=np.concatenate([t.logp_behaviour for t in trajectories]),
        advantage=np.repeat(np.asarray(advantages, dtype=np.float32), lengths),
        temperature=np.array([t.temperature for t in trajectories], dtype=np.float32),
    )


def deal_mini_batches(trajectories: int, parts: int, seed: Sequence[int]) -> list[Ints]:
    """Deal trajectories at random to mini-batches of equal size, give or take one; no empty ones.

    Example:
        >>> [len(part) for part in deal_mini_batches(5, 2, seed=[0])]
        [3, 2]
        >>> deal_mini_batches(3, 1, seed=[0])[0].tolist()
        [0, 1, 2]
    """
    order = np.random.default_rng(list(seed)).permutation(trajectories)
    return [np.sort(order[part::parts]) for part in range(min(parts, trajectories))]


def choose_cuts(
    lengths: Sequence[int] | Ints, budget: int, cost: int = MICRO_BATCH_COST
) -> list[tuple[int, int]]:
    """Cut rows sorted by falling length into runs, each padded to its first row, at the least price.

    Args:
        lengths: positions of each row, not rising.
        budget: most positions of a run, padding included; a single row may be longer.
        cost: price of one run, in positions.

    Returns:
        Runs [start, end) in order.

    Example:
        >>> choose_cuts([100, 10, 10, 9, 9], budget=200, cost=5)
        [(0, 1), (1, 5)]
        >>> choose_cuts([10, 10, 10], budget=20)
        [(0, 2), (2, 3)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = len(sizes)
    best = np.zeros(rows + 1)  # best[i]: least price of rows i and after
    following = np.zeros(rows + 1, dtype=np.int64)
    for start in range(rows - 1, -1, -1):
        most = int(max(1, min(rows - start, budget // max(1, int(sizes[start])))))
        prices = np.arange(1, most + 1) * sizes[start] + cost + best[start + 1 : start + most + 1]
        choice = most - 1 - int(prices[::-1].argmin())  # on a tie the longer run
        best[start] = prices[choice]
        following[start] = start + choice + 1
    cuts, start = [], 0
    while start < rows:
        cuts.append((start, int(following[start])))
        start = int(following[start])
    return cuts


def make_micro_batches(
    batch: Batch,
    members: Ints,
    *,
    aggregation: Aggregation,
    budget: int,
    rank: int = 0,
    ranks: int = 1,
) -> list[MicroBatch]:
    """This rank's micro-batches of one mini-batch; every rank gets equally many.

    Args:
        members: trajectories of the mini-batch, indices into ``batch``.
        aggregation: how tokens are weighted; the denominators are those of the whole mini-batch.
        budget: most positions of a micro-batch, padding included.

    Returns:
        An empty list, on every rank, if no token carries gradient.
    """
    trained = batch.trained[members]
    weights = token_weights(trained, aggregation=aggregation)
    inputs = _needed_inputs(batch)[members]
    kept = np.flatnonzero(trained)
    order = kept[np.argsort(-inputs[kept], kind="stable")]
    rounds = -(-len(order) // ranks)
    mine = [_dealt(order, i, rank, ranks) for i in range(rounds)]
    first_trained = np.concatenate([[0], np.cumsum(batch.trained)])
    result = []
    for start, end in choose_cuts(inputs[order[::ranks]], budget):
        rows = [row for row in mine[start:end] if row is not None]
        result.append(_micro_batch(batch, members[rows], weights[rows], inputs[rows], first_trained))
    return result


def padding_fraction(filled: int, computed: int) -> float:
    """Share of computed positions that were padding.

    Example:
        >>> padding_fraction(75, 100)
        0.25
    """
    return 1 - filled / computed if computed else 0.0


def _needed_inputs(batch: Batch) -> Ints:
    """Positions of each trajectory the model must see, [S]: up to the one that predicts its last target."""
    needed = np.zeros(len(batch.lengths), dtype=np.int64)
    starts = batch.starts
    places = np.flatnonzero(batch.loss_mask)
    owners = np.searchsorted(starts, places, side="right") - 1
    np.maximum.at(needed, owners, places - starts[owners])
    return needed


def _dealt(order: Ints, turn: int, rank: int, ranks: int) -> int | None:
    """Row that ``rank`` gets in this turn; the direction alternates, so that none always gets the longer."""
    place = turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)
    return int(order[place]) if place < len(order) else None


def _micro_batch(
    batch: Batch,
    members: Ints,
    weights: NDArray[np.float64],
    inputs: Ints,
    first_trained: Ints,
) -> MicroBatch:
    if not len(members):
        return _dummy()
    width = int(inputs.max())
    token_ids = np.full((len(members), width), PADDING, dtype=np.int64)
    places, positions, tokens = [], [], []
    starts = batch.starts
    for row, (member, length) in enumerate(zip(members, inputs, strict=True)):
        start = starts[member]
        token_ids[row, :length] = batch.token_ids[start : start + length]
        targets = np.flatnonzero(batch.loss_mask[start : starts[member + 1]])
        places.append(start + targets)
        positions.append(row * width + targets - 1)
        tokens.append(first_trained[member] + np.arange(len(targets)))
    counts = [len(p) for p in places]
    place = np.concatenate(places)
    return MicroBatch(
        token_ids=token_ids,
        position=np.concatenate(positions),
        target=batch.token_ids[place].astype(np.int64),
        temperature=np.repeat(batch.temperature[members], counts),
        logp_behaviour=batch.logp_behaviour[place],
        advantage=batch.advantage[place],
        weight=np.repeat(weights, counts).astype(np.float32),
        token=np.concatenate(tokens),
        filled=int(inputs.sum()),
    )


def _dummy() -> MicroBatch:
    """Takes part in every collective and changes nothing."""
    zero = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        token_ids=np.full((1, 1), PADDING, dtype=np.int64),
        position=np.zeros(1, dtype=np.int64),
        target=np.zeros(1, dtype=np.int64),
        temperature=np.ones(1, dtype=np.float32),
        logp_behaviour=zero,
        advantage=zero,
        weight=zero,
        token=np.full(1, -1, dtype=np.int64),
        filled=0,
    )
