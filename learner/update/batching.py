"""Conversion of trajectories to micro-batches, by pure functions of arrays that run on every rank.

A mini-batch (one optimizer step) is sorted by length and dealt to the ranks in turns, so that all ranks get
nearly the same lengths. The sorted rows are then cut into micro-batches of at most `budget` positions; the
cuts are chosen to waste the least. The cuts are common to all ranks, so every rank runs the same number of
micro-batches, which collectives under ZeRO 3 need. A rank that has no row left runs a dummy of weight zero.

Rows are padded on the right. Under causal attention no token attends to the padding after it, so no mask
is needed, and any causal language model gives the same numbers as for one trajectory at a time. A row holds a
branch of a trajectory, see `learner.branches`; most trajectories have one. Branches of a group may share a row, see
`learner.update.sharing`; then each token has a position and a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.aggregation import token_weights
from learner.algorithms.staleness import assert_lag_bound, loss_mask
from learner.settings.algorithm import AggregationConfig
from learner.trajectory import Trajectory
from learner.update.credit_assignment import TokenAdvantages
from learner.update.packing import ON_CPU, CutRule, choose_cuts, dealt_row
from learner.update.sharing import Row, make_rows, tree_attention
from protocol.arrays import Float32s, Int64s

PADDING = 0
"""Token id of the padding. Any id will do, because no token attends to the padding."""


@dataclass(frozen=True, eq=False)
class BatchBranches:
    """Branches of all trajectories of a batch, laid one behind the other."""

    owner: NDArray[np.int32]
    """Trajectory of each branch, [K]."""
    lengths: NDArray[np.int32]
    """Tokens of each branch, [K]."""
    places: NDArray[np.int32]
    """Index of each branch's tokens among the tokens of all trajectories, [ΣL]."""
    own: NDArray[np.bool_]
    """Whether no earlier branch of the trajectory has the token, [ΣL]."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Trajectories laid one behind the other; rank 0 sends this to the other ranks."""

    lengths: NDArray[np.int32]
    """Tokens of each trajectory, [S]."""
    temperature: Float32s
    """Sampling temperature of each trajectory, [S]."""
    group: NDArray[np.int32]
    """Index of each trajectory's rollout group, [S]."""
    token_ids: NDArray[np.int32]
    """Token ids of all trajectories, [ΣT]."""
    loss_mask: NDArray[np.bool_]
    """Tokens that carry policy gradient, [ΣT]."""
    seen_mask: NDArray[np.bool_]
    """Tokens that carry policy gradient, or that the critic or imitation learns from, [ΣT]."""
    columns: dict[str, Float32s]
    """Numbers of each token by name, [ΣT] each, see `make_batch`."""
    branches: "BatchBranches | None" = None
    """Branches of the trajectories; None: each has one."""

    @property
    def starts(self) -> Int64s:
        """Index of the first token of each trajectory, and last the number of all tokens, [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def trained(self) -> Int64s:
        """Number of tokens of each trajectory that carry policy gradient, [S]."""
        return self.count(self.loss_mask)

    def count(self, mask: NDArray[np.bool_]) -> Int64s:
        """Count the tokens of each trajectory under a mask [ΣT]. The counts are [S]."""
        return _counts(mask, self.starts)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Input of one forward and backward pass: B rows of T positions, and N targets over all rows."""

    token_ids: Int64s
    """Input token ids, [B, T]."""
    position: Int64s
    """Index b·T + t of the input position whose output predicts each target, [N]."""
    target: Int64s
    """Token id of each target, [N]."""
    temperature: Float32s
    """Sampling temperature of each target, [N]."""
    sequence: Int64s
    """Index of each target's branch in the micro-batch, [N]."""
    columns: dict[str, Float32s]
    """Columns of the batch at each target, [N] each, and each target's share in the losses of the mini-batch:
    `weight`, `value_weight`, `imitation_weight`."""
    policy: NDArray[np.bool_]
    """Mask of the targets that carry policy gradient, [N]."""
    token: Int64s
    """Index of each target among the batch's seen tokens, [N]; -1 in a dummy."""
    filled: int
    """Number of input positions that are not padding."""
    inputs: int
    """Number of inputs of all branches, shared ones counted for each."""
    held: list[tuple[int, Int64s]]
    """Index b·T of the row that holds each branch, and the places of its inputs in that row, [S]."""
    begins: Int64s
    """Index of the first token of each branch, in the batch or in `origin`, [S]."""
    origin: NDArray[np.int32] | None = None
    """Index in the batch of each token of all branches; None: each trajectory has one branch."""
    depth: Int64s | None = None
    """Position of each token in its branch, [B, T]; None if no row is shared."""
    attends: NDArray[np.bool_] | None = None
    """Positions that each position attends to, [B, T, T]; None if no row is shared."""

    @property
    def input_token(self) -> Int64s:
        """Index in the batch of each input token of all branches, [inputs]."""
        tokens = [
            begin + np.arange(places.size) for begin, (_, places) in zip(self.begins, self.held, strict=True)
        ]
        found = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
        return found if self.origin is None else self.origin[found].astype(np.int64)

    @property
    def input_place(self) -> Int64s:
        """Index b·T + t of the position that holds each of them, [inputs]."""
        found = [offset + places for offset, places in self.held]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def make_batch(
    trajectories: Sequence[Trajectory],
    credit: TokenAdvantages,
    *,
    current_version: int,
    max_policy_lag: int,
    max_replay_lag: int = 0,
    imitate_from: float | None = None,
) -> Batch:
    """Lay trajectories out and decide which tokens carry gradient.

    The columns are ``fresh`` (0 or 1), ``logp_behaviour``, ``lag`` (versions), ``turn`` (index),
    ``advantage``, ``median_advantage``, ``value_mask``, ``value_target`` and ``imitation_mask``.

    Args:
        max_policy_lag: bound for trajectories that are trained for the first time.
        max_replay_lag: bound for replayed ones.
        imitate_from: the fresh tokens of good trajectories are imitated, see `_is_good`. The number is the
            smallest return of a good one where the environment does not tell; None: nothing is imitated.

    Raises:
        StaleTokens: a token is from a version that does not exist yet, or a fault in the mask lets a token
            pass that lags more than its bound.
    """
    bounds = [max_replay_lag if t.replayed else max_policy_lag for t in trajectories]
    within = [_within_bound(t, current_version, bound) for t, bound in zip(trajectories, bounds, strict=True)]
    present = [np.arange(len(t)) >= t.window_start for t in trajectories]
    fresh = np.concatenate([mask & here for mask, here in zip(within, present, strict=True)])
    lengths = np.array([len(t) for t in trajectories], dtype=np.int32)
    good = [imitate_from is not None and _is_good(t, imitate_from) for t in trajectories]
    imitation = np.concatenate(within) & np.repeat(np.array(good, dtype=np.bool_), lengths)
    loss_mask = fresh & credit.policy
    _assert_bounds(trajectories, loss_mask | imitation, current_version, bounds)
    columns = {
        "fresh": fresh,
        "logp_behaviour": np.concatenate([t.logp_behaviour for t in trajectories]),
        "lag": np.where(fresh, current_version - np.concatenate([t.policy_version for t in trajectories]), 0),
        "turn": np.concatenate([t.action_turn_index() for t in trajectories]),
        "advantage": credit.advantage,
        "median_advantage": credit.median_advantage,
        "value_mask": credit.value,
        "value_target": credit.value_target,
        "imitation_mask": imitation,
    }
    return Batch(
        lengths=lengths,
        temperature=np.array([t.temperature for t in trajectories], dtype=np.float32),
        group=np.unique([t.group_id for t in trajectories], return_inverse=True)[1].astype(np.int32),
        token_ids=np.concatenate([t.token_ids for t in trajectories]),
        loss_mask=loss_mask,
        seen_mask=loss_mask | credit.value | imitation,
        columns={name: np.ascontiguousarray(column, dtype=np.float32) for name, column in columns.items()},
        branches=_branches(trajectories),
    )


def _branches(trajectories: Sequence[Trajectory]) -> BatchBranches | None:
    if not any([turn.back != 1 for t in trajectories for turn in t.turns]):
        return None
    found = [(number, branch) for number, t in enumerate(trajectories) for branch in t.branches()]
    starts = np.concatenate([[0], np.cumsum([len(t) for t in trajectories])])
    places = [starts[number] + branch.places for number, branch in found]
    return BatchBranches(
        owner=np.array([number for number, _ in found], dtype=np.int32),
        lengths=np.array([len(branch.places) for _, branch in found], dtype=np.int32),
        places=np.concatenate(places).astype(np.int32),
        own=np.concatenate([branch.own for _, branch in found]),
    )


def _is_good(t: Trajectory, smallest_return: float) -> bool:
    """Return whether a trajectory ended and solved its task.

    A wrong answer with partial credit is not good. The return decides only if the environment does not tell.
    """
    if t.status == "unfinished":
        return False
    return t.return_ >= smallest_return if t.correct is None else t.correct


def _within_bound(t: Trajectory, current_version: int, max_policy_lag: int) -> NDArray[np.bool_]:
    """Return the action tokens that are fresh enough. A greedy trajectory has none, because it has no
    behaviour distribution to train against."""
    if t.baseline:
        return np.zeros(len(t), dtype=np.bool_)
    return loss_mask(
        t.learned_mask,
        t.policy_version,
        current_version=current_version,
        max_policy_lag=max_policy_lag,
    )


def _assert_bounds(
    trajectories: Sequence[Trajectory], mask: NDArray[np.bool_], current_version: int, bounds: Sequence[int]
) -> None:
    """Check the lag bounds on the very mask by which gradient flows."""
    start = 0
    for t, bound in zip(trajectories, bounds, strict=True):
        assert_lag_bound(
            mask[start : start + len(t)],
            t.policy_version,
            current_version=current_version,
            max_policy_lag=bound,
            trajectory_id=t.trajectory_id,
        )
        start += len(t)


def make_micro_batches(
    batch: Batch,
    members: Int64s,
    *,
    aggregation: AggregationConfig,
    budget: int,
    rule: CutRule = ON_CPU,
    rank: int = 0,
    ranks: int = 1,
    width: int = 0,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of one mini-batch. Every rank gets the same number.

    Args:
        members: trajectories of the mini-batch, indices into ``batch``.
        aggregation: how tokens are weighted; the denominators count the whole mini-batch.
        budget: largest number of positions of a micro-batch, padding included.
        rule: how much padding is accepted to save one micro-batch.
        rank: this rank, counted from 0.
        ranks: number of ranks.
        width: width of the model's residual stream, if trajectories of a group may share rows; 0: they may not.

    Returns:
        The micro-batches in order of falling length; an empty list, on every rank, if no token is to be seen.
    """
    layout = _layout(batch)
    shares = _shares(batch, members, aggregation)
    kept, place = _in_order(layout, members, len(batch.lengths))
    every = layout.token_ids.astype(np.int64)
    token_ids = [every[layout.starts[i] : layout.starts[i] + layout.inputs[i]] for i in kept]
    groups = batch.group[layout.owner[kept]].astype(np.int64)
    rows = make_rows(token_ids, groups, width=width, budget=budget, ranks=ranks)
    lengths = np.array([row.token_ids.size for row in rows], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    rounds = -(-len(order) // ranks)
    mine = [dealt_row(order, i, rank, ranks) for i in range(rounds)]
    result = []
    for start, end in choose_cuts(lengths[order[::ranks]], budget, rule):
        chosen = [rows[index] for index in mine[start:end] if index is not None]
        own = [branch for row in chosen for branch in row.members]
        own_shares = {name: values[place[own]] for name, values in shares.items()}
        result.append(_micro_batch(batch, layout, chosen, kept[own], own_shares))
    return result


@dataclass(frozen=True, eq=False)
class _Layout:
    """Tokens of all branches of a batch, one branch behind the other. Without branches, those of the batch."""

    owner: NDArray[np.int64]
    """Trajectory of each branch, [K]."""
    starts: Int64s
    """Index of the first token of each branch, and last the number of all tokens, [K + 1]."""
    token_ids: NDArray[np.int32]
    """Token ids, [ΣL]."""
    target: NDArray[np.bool_]
    """Tokens that are seen, and that no earlier branch of the trajectory has, [ΣL]."""
    origin: NDArray[np.int32] | None
    """Index of each token in the batch, [ΣL]; None: it is the same."""
    targets: Int64s
    """Number of targets of each branch, [K]."""
    inputs: Int64s
    """Number of inputs that the model must see of each branch: up to the one that predicts its last target, [K]."""


def _layout(batch: Batch) -> _Layout:
    branches = batch.branches
    if branches is None:
        owner, lengths = np.arange(len(batch.lengths)), batch.lengths
        token_ids, target, origin = batch.token_ids, batch.seen_mask, None
    else:
        owner, lengths, origin = branches.owner.astype(np.int64), branches.lengths, branches.places
        token_ids, target = batch.token_ids[origin], batch.seen_mask[origin] & branches.own
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    needed = np.zeros(len(lengths), dtype=np.int64)
    places = np.flatnonzero(target)
    owners = np.searchsorted(starts, places, side="right") - 1
    np.maximum.at(needed, owners, places - starts[owners])
    return _Layout(owner, starts, token_ids, target, origin, _counts(target, starts), needed)


def _counts(mask: NDArray[np.bool_], starts: Int64s) -> Int64s:
    """Count the tokens under a mask between each start and the next."""
    sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    counts: Int64s = sums[starts[1:]] - sums[starts[:-1]]
    return counts


def _in_order(layout: _Layout, members: Int64s, trajectories: int) -> tuple[Int64s, Int64s]:
    """Return the branches of a mini-batch that have targets, in its order, and each one's place in it."""
    places = np.full(trajectories, -1, dtype=np.int64)
    places[members] = np.arange(len(members))
    place = places[layout.owner]
    order = np.argsort(place, kind="stable")
    kept = order[(place[order] >= 0) & (layout.targets[order] > 0)]
    return kept, place[kept]


def _shares(batch: Batch, members: Int64s, aggregation: AggregationConfig) -> dict[str, NDArray[np.float64]]:
    """Compute the weight of one token of each member, in each of the losses."""
    tokens = 0 if isinstance(aggregation, str) else aggregation.tokens
    trained = batch.trained[members]
    valued = batch.count(batch.columns["value_mask"] > 0)[members]
    imitated = batch.count(batch.columns["imitation_mask"] > 0)[members]
    return {
        "weight": token_weights(
            trained, aggregation=aggregation if isinstance(aggregation, str) else "fixed", fixed_tokens=tokens
        ),
        "value_weight": token_weights(valued, aggregation="sequence_mean"),
        "imitation_weight": token_weights(imitated, aggregation="token_mean"),
    }


def _micro_batch(
    batch: Batch,
    layout: _Layout,
    rows: Sequence[Row],
    branches: Int64s,
    shares: dict[str, NDArray[np.float64]],
) -> MicroBatch:
    """Return the micro-batch of these rows. ``branches`` are those that they hold, in the order of the rows."""
    if not rows:
        return _dummy([*batch.columns, *shares])
    length = max([row.token_ids.size for row in rows])
    token_ids = np.full((len(rows), length), PADDING, dtype=np.int64)
    for i, row in enumerate(rows):
        token_ids[i, : row.token_ids.size] = row.token_ids
    places, positions = [], []
    starts = layout.starts
    inputs = [(i * length, places) for i, row in enumerate(rows) for places in row.places]
    for branch, (offset, input_places) in zip(branches, inputs, strict=True):
        start = starts[branch]
        targets = np.flatnonzero(layout.target[start : starts[branch + 1]])
        places.append(start + targets)
        positions.append(offset + input_places[targets - 1])
    counts = layout.targets[branches]
    place = np.concatenate(places)
    if layout.origin is not None:
        place = layout.origin[place].astype(np.int64)
    columns = {name: column[place] for name, column in batch.columns.items()}
    masks = {
        "weight": batch.loss_mask[place],
        "value_weight": columns["value_mask"],
        "imitation_weight": columns["imitation_mask"],
    }
    for name, share in shares.items():
        columns[name] = (np.repeat(share, counts) * masks[name]).astype(np.float32)
    return MicroBatch(
        token_ids=token_ids,
        position=np.concatenate(positions),
        target=batch.token_ids[place].astype(np.int64),
        temperature=np.repeat(batch.temperature[layout.owner[branches]], counts),
        sequence=np.repeat(np.arange(len(branches)), counts),
        columns=columns,
        policy=batch.loss_mask[place],
        token=np.searchsorted(np.flatnonzero(batch.seen_mask), place),
        filled=sum([row.token_ids.size for row in rows]),
        inputs=sum([places.size for _, places in inputs]),
        held=inputs,
        begins=starts[branches],
        origin=layout.origin,
        **_tree(rows, length),
    )


def _tree(rows: Sequence[Row], length: int) -> dict[str, NDArray[Any]]:
    """Return `MicroBatch.depth` and `MicroBatch.attends`, if some row is shared."""
    if sum([len(row.members) for row in rows]) == len(rows):
        return {}
    depth = np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        depth[i, : row.token_ids.size] = row.depth
    return {"depth": depth, "attends": tree_attention(rows, length)}


def _dummy(columns: Sequence[str]) -> MicroBatch:
    """Return a micro-batch that takes part in every collective and changes nothing."""
    return MicroBatch(
        token_ids=np.full((1, 1), PADDING, dtype=np.int64),
        position=np.zeros(1, dtype=np.int64),
        target=np.zeros(1, dtype=np.int64),
        temperature=np.ones(1, dtype=np.float32),
        sequence=np.zeros(1, dtype=np.int64),
        columns={name: np.zeros(1, dtype=np.float32) for name in columns},
        policy=np.ones(1, dtype=np.bool_),
        token=np.full(1, -1, dtype=np.int64),
        filled=0,
        inputs=0,
        held=[],
        begins=np.zeros(0, dtype=np.int64),
    )
