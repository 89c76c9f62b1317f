r"""Rows of a micro-batch, in which tokens that trajectories have in common appear once. Pure functions.

The members of a rollout group begin with the same prompt, and often with the same first tokens. A row holds
their tokens as a tree: each token is a node, its parent is the token before it. A token attends to its
ancestors and itself, and its position is its depth. So every member gets the numbers that it would get alone,
and the gradients of all members add up in the tokens that they share::

    What is 2 + 3 ?  -+- It  -+- is 5
                      |       +- 's five
                      +- 5

With n members, a prompt of P tokens and answers of A tokens, a row has P + nA positions in place of n(P + A).

Where the experts of tokens are given (`learner.model.routes`), a node also stands for the experts of its token. Members
whose tokens went through different experts share only what is before the first of these tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import Int64s

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
