"""Rows of tokens, and micro-batches cut from them.

Rows are dealt to mini-batches, micro-batches and ranks, and shared by trajectories with one beginning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.tokens import token_weights
from learner.settings.algorithm import AggregationConfig
from learner.update.batch import Batch, counts
from protocol.arrays import Float32s, Int64s


@dataclass(frozen=True)
class CutRule:
    """Rule for cutting rows into micro-batches."""

    cost: int
    """Fixed price of one more micro-batch, in positions. It pays for many small operators, and for reading
    weights and adding gradients once more."""
    least_cost: int
    """Lower limit of the price, which is halved while there is more padding than `MOST_PADDING`."""


MOST_PADDING = 0.045
"""Share of padding in the computed positions above which the price of a micro-batch is lowered."""
ON_CPU = CutRule(cost=64, least_cost=16)
"""Rule on a CPU. Measured prices with 1, 10 and 50 million parameters: 70 to 100 positions."""
ON_GPU = CutRule(cost=1024, least_cost=1024)
"""Rule on a GPU. The price is an estimate: launching the operators of a micro-batch takes as long as
computing about a thousand positions."""


def deal_mini_batches(trajectories: int, parts: int, seed: Sequence[int]) -> list[Int64s]:
    """Deal trajectories at random to mini-batches whose sizes differ by at most one. None is empty.

    Example:
        >>> [len(part) for part in deal_mini_batches(5, 2, seed=[0])]
        [3, 2]
        >>> deal_mini_batches(3, 1, seed=[0])[0].tolist()
        [0, 1, 2]
    """
    order = np.random.default_rng(list(seed)).permutation(trajectories)
    return [np.sort(order[part::parts]) for part in range(min(parts, trajectories))]


def choose_cuts(lengths: Sequence[int] | Int64s, budget: int, rule: CutRule) -> list[tuple[int, int]]:
    """Cut rows sorted by falling length into runs, each padded to its first row.

    Args:
        lengths: positions of each row, not rising.
        budget: largest number of positions of a run, padding included; a single row may be longer.
        rule: price of a run. The cuts are the cheapest at this price, which is lowered while there is much
            padding.

    Returns:
        Runs [start, end) in order.

    Example:
        >>> choose_cuts([100, 50, 50], budget=300, rule=CutRule(cost=150, least_cost=150))
        [(0, 3)]
        >>> choose_cuts([100, 50, 50], budget=300, rule=CutRule(cost=150, least_cost=5))
        [(0, 1), (1, 3)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    cost = rule.cost
    while True:
        cuts = cheapest_cuts(sizes, budget, cost)
        computed = sum(int(sizes[start]) * (end - start) for start, end in cuts)
        if (
            cost // 2 < max(1, rule.least_cost)
            or padding_fraction(int(sizes.sum()), computed) <= MOST_PADDING
        ):
            return cuts
        cost //= 2


def cheapest_cuts(lengths: Sequence[int] | Int64s, budget: int, cost: int) -> list[tuple[int, int]]:
    """Cut rows into runs as in `choose_cuts`, at the lowest total price.

    Args:
        lengths: positions of each row, not rising.
        budget: largest number of positions of a run, padding included; a single row may be longer.
        cost: price of one run, in positions.

    Returns:
        Runs [start, end) in order.

    Example:
        >>> cheapest_cuts([100, 10, 10, 9, 9], budget=200, cost=5)
        [(0, 1), (1, 5)]
        >>> cheapest_cuts([10, 10, 10], budget=20, cost=128)
        [(0, 2), (2, 3)]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = len(sizes)
    # best[i] is the lowest price of row i and all rows after it.
    best = np.zeros(rows + 1)
    following = np.zeros(rows + 1, dtype=np.int64)
    for start in range(rows - 1, -1, -1):
        most = int(max(1, min(rows - start, budget // max(1, int(sizes[start])))))
        prices = np.arange(1, most + 1) * sizes[start] + cost + best[start + 1 : start + most + 1]
        # On a tie, take the longer run.
        choice = most - 1 - int(prices[::-1].argmin())
        best[start] = prices[choice]
        following[start] = start + choice + 1
    cuts, start = [], 0
    while start < rows:
        cuts.append((start, int(following[start])))
        start = int(following[start])
    return cuts


def padding_fraction(filled: int, computed: int) -> float:
    """Return the share of computed positions that were padding.

    Example:
        >>> padding_fraction(75, 100)
        0.25
    """
    return 1 - filled / computed if computed else 0.0


def dealt_row(order: Int64s, turn: int, rank: int, ranks: int) -> int | None:
    """Return the row that ``rank`` gets in this turn, or None if no row is left for it.

    The direction alternates, so that no rank always gets the longer row.
    """
    place = turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)
    return int(order[place]) if place < len(order) else None


EXPERT_BITS = 32
"""Bits by which the number of a token's experts is shifted, beside the token's id, so that both are compared as one."""
MAX_POSITIONS = 4096
"""Upper limit of the positions of a row with several members. Its attention mask grows with their square."""


@dataclass(eq=False, slots=True)
class Row:
    """Inputs of one trajectory, or of several that share their beginnings."""

    members: list[int]
    """Indices of the trajectories."""
    token_ids: Int64s
    """Token ids, [T]. A node stands behind its parent."""
    depth: Int64s
    """Number of ancestors of each token, [T]: its position in the trajectory."""
    places: list[Int64s]
    """Positions in the row of the inputs of each member, in order."""

    @property
    def inputs(self) -> int:
        """Number of inputs of all members, shared ones counted for each."""
        return sum([places.size for places in self.places])


def plain_rows(token_ids: Sequence[Int64s]) -> list[Row]:
    """Return a row for each trajectory.

    Args:
        token_ids: inputs of each trajectory, [T_i].
    """
    counted = np.arange(max([ids.size for ids in token_ids], default=0))
    return [
        Row([member], ids, counted[: ids.size], [counted[: ids.size]]) for member, ids in enumerate(token_ids)
    ]


def tree_row(members: Sequence[int], token_ids: Sequence[Int64s]) -> Row:
    """Return the row of several trajectories, with each shared beginning once.

    Args:
        members: indices of the trajectories, in the lexical order of their inputs.
        token_ids: inputs of each member.

    Example:
        >>> row = tree_row([7, 9], [np.array([1, 2, 3]), np.array([1, 2, 4, 5])])
        >>> row.token_ids.tolist(), row.depth.tolist()
        ([1, 2, 3, 4, 5], [0, 1, 2, 2, 3])
        >>> [places.tolist() for places in row.places]
        [[0, 1, 2], [0, 1, 3, 4]]
    """
    ids: list[Int64s] = []
    depth: list[Int64s] = []
    places: list[Int64s] = []
    size, before = 0, np.zeros(0, dtype=np.int64)
    for own in token_ids:
        # In lexical order, no earlier trajectory shares more with this one than the one before it.
        shared = shared_length(before, own)
        new = len(own) - shared
        above = places[-1][:shared] if places else np.zeros(0, dtype=np.int64)
        places.append(np.concatenate([above, np.arange(size, size + new)]))
        ids.append(own[shared:])
        depth.append(np.arange(shared, len(own)))
        size, before = size + new, own
    return Row(list(members), np.concatenate(ids), np.concatenate(depth), places)


def shared_length(one: Int64s, other: Int64s) -> int:
    """Return how many tokens two sequences have in common at their beginning.

    Example:
        >>> shared_length(np.array([1, 2, 3]), np.array([1, 2]))
        2
    """
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def make_rows(
    token_ids: Sequence[Int64s],
    groups: Int64s,
    *,
    width: int,
    budget: int,
    ranks: int = 1,
    experts: Sequence[Int64s] | None = None,
) -> list[Row]:
    """Return rows that hold every trajectory once. Trajectories of a group share a row where that is cheaper.

    Several ranks need rows to share out: the rows are made shorter until there are two for each rank.

    Args:
        token_ids: inputs of each trajectory, [L_i].
        groups: index of each trajectory's rollout group, [S]. Only trajectories of one group share a row.
        width: width of the model's residual stream, see `price`; 0: nothing is shared.
        budget: upper limit of the positions of a row with several members.
        ranks: number of ranks that the rows are dealt to.
        experts: number of each input's given experts, [L_i], as in `Batch.route_numbers`; None: none are given.
    """
    if experts is not None and width:
        both = [ids | numbers << EXPERT_BITS for ids, numbers in zip(token_ids, experts, strict=True)]
        rows = make_rows(both, groups, width=width, budget=budget, ranks=ranks)
        for row in rows:
            row.token_ids = row.token_ids & ((1 << EXPERT_BITS) - 1)
        return rows
    alone = plain_rows(token_ids)
    if not width or not alone:
        return alone
    most, longest = min(budget, MAX_POSITIONS), max([row.token_ids.size for row in alone])
    wanted = 1 if ranks == 1 else min(2 * ranks, len(alone))
    while True:
        rows = [
            row for group in np.unique(groups) for row in _group_rows(alone, groups == group, width, most)
        ]
        if len(rows) >= wanted or most <= longest:
            return rows
        most = max(longest, max([row.token_ids.size for row in rows]) // 2)


def _group_rows(alone: Sequence[Row], chosen: NDArray[np.bool_], width: int, most: int) -> list[Row]:
    """Return the cheaper rows of a group: trees of at most ``most`` positions, or its trajectories alone."""
    plain = [alone[index] for index in np.flatnonzero(chosen)]
    runs: list[list[Row]] = []
    size, before = 0, np.zeros(0, dtype=np.int64)
    for row in sorted(plain, key=lambda row: row.token_ids.tolist()):
        new = row.token_ids.size - shared_length(before, row.token_ids)
        if runs and size + new <= most:
            runs[-1].append(row)
            size += new
        else:
            runs.append([row])
            size = row.token_ids.size
        before = row.token_ids
    trees = [
        tree_row([row.members[0] for row in run], [row.token_ids for row in run]) if len(run) > 1 else run[0]
        for run in runs
    ]
    return min(trees, plain, key=lambda rows: sum(price(row, width) for row in rows))


def price(row: Row, width: int) -> float:
    """Return the price of computing a row, in operations of a layer per position and width.

    The linear layers cost 12 width² a position, the attention 2 width for each position that is looked at:
    all of the row in a tree, half of it on average where each token sees what is before it.

    Example:
        >>> answers = [np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 4, 6])]
        >>> price(tree_row([0, 1], answers), 64) < 2 * price(plain_rows(answers)[0], 64)
        True
    """
    positions = row.token_ids.size
    return positions * (6 * width + (positions if len(row.members) > 1 else positions / 2))


def tree_attention(rows: Sequence[Row], positions: int) -> NDArray[np.bool_]:
    """Return which positions each position attends to, [B, T, T]: its ancestors and itself.

    Padding attends to itself, because attention to nothing is not defined.

    Example:
        >>> row = tree_row([0, 1], [np.array([1, 2]), np.array([1, 3])])
        >>> tree_attention([row], 4)[0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    """
    attends = np.zeros((len(rows), positions, positions), dtype=np.bool_)
    attends[:, np.arange(positions), np.arange(positions)] = True
    for sees, row in zip(attends, rows, strict=True):
        for places in row.places:
            sees[np.ix_(places, places)] |= np.tri(len(places), dtype=np.bool_)
    return attends


PADDING = 0
"""Token id of the padding. Any id will do, because no token attends to the padding."""


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
    `weight`, `value_weight`, `imitation_weight`. `group` is the number of each target's rollout group in the batch, and
    `length` how many tokens of its trajectory carry policy gradient."""
    policy: NDArray[np.bool_]
    """Mask of the targets that carry policy gradient, [N]."""
    token: Int64s
    """Index of each target among the batch's seen tokens, [N]; -1 in a dummy."""
    filled: int
    """Number of input positions that are not padding."""
    inputs: int
    """Number of inputs of all branches, shared ones counted for each."""
    branch_places: list[tuple[int, Int64s]]
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
            begin + np.arange(places.size)
            for begin, (_, places) in zip(self.begins, self.branch_places, strict=True)
        ]
        found = np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64)
        return found if self.origin is None else self.origin[found].astype(np.int64)

    @property
    def input_place(self) -> Int64s:
        """Index b·T + t of the position that holds each of them, [inputs]."""
        found = [offset + places for offset, places in self.branch_places]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def dummy(columns: Sequence[str]) -> MicroBatch:
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
        branch_places=[],
        begins=np.zeros(0, dtype=np.int64),
    )


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
    groups = batch.group[layout.owner[kept]].astype(np.int64)
    rows = make_rows(
        _inputs(layout, kept, layout.token_ids.astype(np.int64)),
        groups,
        width=width,
        budget=budget,
        ranks=ranks,
        experts=_expert_numbers(batch, layout, kept) if width else None,
    )
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
    return _Layout(owner, starts, token_ids, target, origin, counts(target, starts), needed)


def _inputs(layout: _Layout, branches: Int64s, values: Int64s) -> list[Int64s]:
    """Return the values of the inputs of each of these branches. ``values`` are those of all tokens, [ΣL]."""
    return [values[layout.starts[i] : layout.starts[i] + layout.inputs[i]] for i in branches]


def _expert_numbers(batch: Batch, layout: _Layout, branches: Int64s) -> list[Int64s] | None:
    """Return the number of the given experts of each input of these branches; None if none are given."""
    numbers = batch.route_numbers
    if numbers is None:
        return None
    return _inputs(layout, branches, numbers if layout.origin is None else numbers[layout.origin])


def _in_order(layout: _Layout, members: Int64s, trajectories: int) -> tuple[Int64s, Int64s]:
    """Return the branches of a mini-batch that have targets, in its order, and each one's place in it."""
    places = np.full(trajectories, -1, dtype=np.int64)
    places[members] = np.arange(len(members))
    place = places[layout.owner]
    order = np.argsort(place, kind="stable")
    kept = order[(place[order] >= 0) & (layout.targets[order] > 0)]
    return kept, place[kept]


def _shares(batch: Batch, members: Int64s, aggregation: AggregationConfig) -> dict[str, NDArray[np.float64]]:
    """Compute the weight of one token of each member, in each of the losses, and its rollout group and length."""
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
        "group": batch.group[members].astype(np.float64),
        "length": trained.astype(np.float64),
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
        return dummy([*batch.columns, *shares])
    length = max([row.token_ids.size for row in rows])
    token_ids = np.full((len(rows), length), PADDING, dtype=np.int64)
    for i, row in enumerate(rows):
        token_ids[i, : row.token_ids.size] = row.token_ids
    inputs = [(i * length, places) for i, row in enumerate(rows) for places in row.places]
    targets = layout.targets[branches]
    place, position = _targets(layout, branches, inputs)
    return MicroBatch(
        token_ids=token_ids,
        position=position,
        target=batch.token_ids[place].astype(np.int64),
        temperature=np.repeat(batch.temperature[layout.owner[branches]], targets),
        sequence=np.repeat(np.arange(len(branches)), targets),
        columns=_columns(batch, place, {name: np.repeat(share, targets) for name, share in shares.items()}),
        policy=batch.loss_mask[place],
        token=np.searchsorted(np.flatnonzero(batch.seen_mask), place),
        filled=sum([row.token_ids.size for row in rows]),
        inputs=sum([places.size for _, places in inputs]),
        branch_places=inputs,
        begins=layout.starts[branches],
        origin=layout.origin,
        **_tree(rows, length),
    )


def _targets(
    layout: _Layout, branches: Int64s, inputs: Sequence[tuple[int, Int64s]]
) -> tuple[Int64s, Int64s]:
    """Return the index in the batch of each target, and that of the input position which predicts it, [N] each.

    Args:
        inputs: `MicroBatch.branch_places` of the branches.
    """
    places, positions = [], []
    starts = layout.starts
    for branch, (offset, input_places) in zip(branches, inputs, strict=True):
        start = starts[branch]
        targets = np.flatnonzero(layout.target[start : starts[branch + 1]])
        places.append(start + targets)
        positions.append(offset + input_places[targets - 1])
    place = np.concatenate(places)
    if layout.origin is not None:
        place = layout.origin[place].astype(np.int64)
    return place, np.concatenate(positions)


def _columns(batch: Batch, place: Int64s, shares: dict[str, NDArray[np.float64]]) -> dict[str, Float32s]:
    """Return `MicroBatch.columns` of the targets at these places; a share is 0 where a loss leaves a target out."""
    columns = {name: column[place] for name, column in batch.columns.items()}
    masks: dict[str, NDArray[Any]] = {
        "weight": batch.loss_mask[place],
        "value_weight": columns["value_mask"],
        "imitation_weight": columns["imitation_mask"],
    }
    for name, share in shares.items():
        columns[name] = (share * masks.get(name, 1.0)).astype(np.float32)
    return columns


def _tree(rows: Sequence[Row], length: int) -> dict[str, NDArray[Any]]:
    """Return `MicroBatch.depth` and `MicroBatch.attends`, if some row is shared."""
    if sum([len(row.members) for row in rows]) == len(rows):
        return {}
    depth = np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        depth[i, : row.token_ids.size] = row.depth
    return {"depth": depth, "attends": tree_attention(rows, length)}


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
