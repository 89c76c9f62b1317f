"""Rows of tokens: dealt to mini-batches, micro-batches and ranks, and shared by trajectories with one beginning."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import Int64s


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
