"""Branches of a trajectory: the conversations that its turns form. Pure.

Each turn continues the turn before it, an earlier one, or none. So the turns form trees, and a branch is the way
from a first turn to a last one. The policy saw a token behind the tokens of its branch before it, and nothing else::

    turn 0 prompt - 1 answer - 2 tool's result - 3 answer
                             \\ 4 shorter result - 5 answer
    turn 6 prompt of a sub-agent - 7 answer

This trajectory has three branches: the turns 0 1 2 3, 0 1 4 5 and 6 7. The tokens of turn 1 are in two of them,
and are trained in the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.errors import BrokenTrajectory
from protocol.arrays import Int64s
from protocol.messages.episodes import Turn

MAX_TOKENS = 2**25
"""Upper limit of the tokens of all branches of a trajectory, shared ones counted for each."""


@dataclass(frozen=True, eq=False)
class Branch:
    """One conversation of a trajectory."""

    places: Int64s
    """Index in the trajectory of each token of the branch, [L]."""
    own: NDArray[np.bool_]
    """Whether no earlier branch has the token, [L]. It is trained in this branch."""


def branches_of(turns: Sequence[Turn], tokens: int) -> list[Branch]:
    """Return the branches in the order of their last turns.

    Args:
        turns: turns of the trajectory, in order.
        tokens: number of its tokens.

    Raises:
        BrokenTrajectory: turns that branch do not hold every token once, or one continues a turn that is not there.

    Example:
        >>> turns = [Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, False), Turn(3, 4, 5, True),
        ...     Turn(4, 5, 6, False, back=3), Turn(5, 6, 7, True)]
        >>> [branch.places.tolist() for branch in branches_of(turns, 7)]
        [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]
        >>> [branch.own.astype(int).tolist() for branch in branches_of(turns, 7)]
        [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    """
    if all(turn.back == 1 for turn in turns):
        return [Branch(np.arange(tokens), np.ones(tokens, dtype=np.bool_))]
    _check(turns, tokens)
    before, ends = turns_before(turns), ends_of(turns)
    _lengths(turns, before, ends)
    span = {turn.index: np.arange(turn.start, turn.end) for turn in turns}
    known: set[int] = set()
    branches = []
    for end in ends:
        way: list[int] = []
        at: int | None = end
        while at is not None:
            way.append(at)
            at = before[at]
        way.reverse()
        own = [np.full(len(span[index]), index not in known) for index in way]
        branches.append(Branch(np.concatenate([span[index] for index in way]), np.concatenate(own)))
        known.update(way)
    return branches


def ends_of(turns: Sequence[Turn]) -> list[int]:
    """Return the index of the last turn of each branch.

    Example:
        >>> turns = [Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, False, back=0), Turn(3, 4, 5, True)]
        >>> ends_of(turns)
        [1, 3]
    """
    continued = set(turns_before(turns).values())
    return [turn.index for turn in turns if turn.index not in continued]


def starts_of(turns: Sequence[Turn], tokens: int) -> list[int]:
    """Return the index of the first token of each tree, and check the turns as `branches_of` does, without its arrays.

    Raises:
        BrokenTrajectory: see `branches_of`.

    Example:
        >>> starts_of([Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, False, back=0)], 4)
        [0, 3]
    """
    if all(turn.back == 1 for turn in turns):
        return [0] if tokens else []
    _check(turns, tokens)
    before = turns_before(turns)
    lengths = _lengths(turns, before, ends_of(turns))
    return [t.start for t in turns if not lengths[before[t.index]] and t.end > t.start]


def turns_before(turns: Sequence[Turn]) -> dict[int, int | None]:
    """Return by index the turn that each turn continues; None: it begins a tree.

    Example:
        >>> turns_before([Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, True, 2), Turn(3, 4, 5, True, 0)])
        {0: None, 1: 0, 2: 0, 3: None}
    """
    return {turn.index: turn.index - turn.back if turn.back and turn.index else None for turn in turns}


def _lengths(
    turns: Sequence[Turn], before: Mapping[int, int | None], ends: Sequence[int]
) -> dict[int | None, int]:
    """Return the number of tokens from the beginning of a tree to the end of each turn.

    Raises:
        BrokenTrajectory: all branches together are too long.
    """
    lengths: dict[int | None, int] = {None: 0}
    for turn in turns:
        lengths[turn.index] = lengths[before[turn.index]] + turn.end - turn.start
    if (total := sum(lengths[end] for end in ends)) > MAX_TOKENS:
        raise BrokenTrajectory(f"{len(ends)} branches have {total} tokens in all, at most {MAX_TOKENS}")
    return lengths


def _check(turns: Sequence[Turn], tokens: int) -> None:
    at = 0
    for number, turn in enumerate(turns):
        if (turn.index, turn.start) != (number, at) or turn.end < at or turn.back > max(number, 1):
            raise BrokenTrajectory(
                f"turn {turn.index} at [{turn.start}, {turn.end}), {turn.back} back, does not fit: it should be turn "
                f"{number} and begin at token {at}"
            )
        at = turn.end
    if at != tokens:
        raise BrokenTrajectory(f"the turns end at token {at}, the trajectory at {tokens}")
