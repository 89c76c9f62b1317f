"""Experts of a trajectory's tokens that are not in a segment yet. Pure."""

import numpy as np

from actors.sampled import Routes, together
from protocol.arrays import MAX_ROUTE_BYTES, Arrays


class RouteBook:
    """Rows of experts, which come by position in the context of a turn and leave by token of the trajectory.

    The context of a turn is its tokens behind those of the turns that it continues.

    Example:
        >>> book = RouteBook()
        >>> book.note(0, 0, 2, before=-1); book.note(1, 2, 4, before=0); book.note(2, 4, 5, before=0)
        >>> book.add(2, Routes(np.array([0, 1, 2], "i4"), np.array([[0, 1], [2, 3], [4, 5]], "u1")))
        >>> {name: array.tolist() for name, array in book.take(5).items()}
        {'routed_token': [0, 1, 4], 'routed_experts': [0, 1, 2, 3, 4, 5]}
        >>> book.take(5)
        {}
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int]] = {}
        self._before: dict[int, int] = {}
        self._rows: Routes | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens whose rows fit into one message."""
        return MAX_ROUTE_BYTES if self._rows is None else max(1, MAX_ROUTE_BYTES // self._rows.row_bytes)

    def note(self, turn: int, start: int, end: int, *, before: int) -> None:
        """Note the tokens of a turn, or that it has grown.

        Args:
            before: turn that it continues; -1: none.
        """
        first, _ = self._spans.get(turn, (start, end))
        self._spans[turn], self._before[turn] = (first, end), before

    def add(self, turn: int, routes: Routes) -> None:
        """Add rows by position in the context of a turn. All of them are of tokens that the turn has."""
        way = []
        while turn >= 0:
            way.append(self._spans[turn])
            turn = self._before[turn]
        context = np.concatenate([np.arange(*span, dtype=np.int32) for span in reversed(way)])
        moved = Routes(context[routes.tokens], routes.experts)
        self._rows = together([moved] if self._rows is None else [self._rows, moved])

    def waits(self, end: int) -> bool:
        """Return whether tokens before ``end`` have more rows than fit into one message."""
        return self._rows is not None and int((self._rows.tokens < end).sum()) > self.most_tokens

    def take(self, end: int) -> Arrays:
        """Return and remove rows of tokens before ``end``, as many as fit into one message."""
        if self._rows is None:
            return {}
        (places,) = np.nonzero(self._rows.tokens < end)
        places = places[: self.most_tokens]
        if not len(places):
            return {}
        taken = self._rows.rows(places)
        rest = np.delete(np.arange(len(self._rows)), places)
        self._rows = self._rows.rows(rest) if len(rest) else None
        return taken.arrays
