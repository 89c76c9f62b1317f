"""Tokens that a generator has sampled. They stay in this form from the engine to the segment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from protocol.arrays import ROUTED_EXPERTS, ROUTED_TOKEN, Arrays, Experts, Float32s, Int32s
from protocol.messages.fields import KvPolicy

FinishReason = Literal["", "stop", "length", "abort"]
"""Reason why an answer ended; "" while it goes on."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts that tokens went through as inputs of the generator, a row for each token.

    Example:
        >>> some = Routes(np.array([3, 4, 5], "i4"), np.arange(6, dtype="u1").reshape(3, 2))
        >>> len(some), some.rows(some.tokens > 3).experts.tolist()
        (3, [[2, 3], [4, 5]])
    """

    tokens: Int32s
    """Position of each row's token: in the prompt and its answer, or in a trajectory."""
    experts: Experts
    """Experts of all layers, [n, layers * experts of a layer]."""

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, chosen: Any) -> "Routes":
        """Return some of the rows: a mask, a slice, or indices."""
        return Routes(self.tokens[chosen], self.experts[chosen])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return int(self.tokens.itemsize + self.experts.shape[1] * self.experts.itemsize)

    def reach(self, known: int) -> int:
        """Return the number of first tokens whose rows are known, if ``known`` were before these rows came.

        Example:
            >>> some = Routes(np.array([3, 4], "i4"), np.zeros((2, 1), "u1"))
            >>> some.reach(3), some.reach(2), some.reach(9)
            (5, 2, 9)
        """
        return known if self.tokens[0] > known else max(known, int(self.tokens[-1]) + 1)

    @property
    def arrays(self) -> Arrays:
        """Arrays by their names on the wire."""
        return {ROUTED_TOKEN: self.tokens, ROUTED_EXPERTS: self.experts.reshape(-1)}


def together(routes: Sequence[Routes]) -> Routes | None:
    """Return all rows as one; None if there are none."""
    if not routes:
        return None
    return Routes(
        np.concatenate([each.tokens for each in routes]), np.concatenate([each.experts for each in routes])
    )


def pieces(routes: Routes | None, nbytes: int) -> list[Routes | None]:
    """Return rows in pieces of at most so many bytes, at least one piece, and one row in each.

    Example:
        >>> some = Routes(np.arange(5, dtype="i4"), np.zeros((5, 2), "u1"))
        >>> [len(piece) for piece in pieces(some, 20)], pieces(None, 20)
        ([3, 2], [None])
    """
    if routes is None:
        return [None]
    many = max(1, nbytes // routes.row_bytes)
    return [routes.rows(slice(at, at + many)) for at in range(0, len(routes), many)]


def routes_in(arrays: Arrays) -> Routes | None:
    """Return the rows among the arrays of a message; None if it has none.

    Raises:
        ValueError: the rows are incomplete.
    """
    if ROUTED_EXPERTS not in arrays:
        return None
    tokens, experts = arrays[ROUTED_TOKEN].astype(np.int32, copy=False), arrays[ROUTED_EXPERTS]
    if experts.dtype.kind not in "iu":
        raise ValueError(f"{ROUTED_EXPERTS} is {experts.dtype}, and must be u1 or i2")
    return Routes(tokens, experts.reshape(len(tokens), -1)) if len(tokens) else None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Newly sampled tokens, in order. The three arrays have the same length, which may be 0.

    Example:
        >>> some = Sampled(np.array([5, 7], "i4"), np.array([-0.5, -1.0], "f4"), np.array([3, 3], "i4"))
        >>> len(some), some.finish_reason
        (2, '')
    """

    token_ids: Int32s
    logp_behaviour: Float32s
    """Natural log of each token's behaviour probability, after temperature, top_p and top_k."""
    policy_version: Int32s
    """Policy version that sampled each token."""
    finish_reason: FinishReason = ""
    """Reason why the answer ended with these tokens. An end token, if one was sampled, is among the ids."""
    kv: KvPolicy = "recomputed"
    """Treatment of cached keys and values at a weight update."""
    generator: str = ""
    """Name of the generator that sampled the tokens."""
    routes: Routes | None = None
    """Experts of tokens of the prompt and of the answer, by position in both; None: they are not known."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logp_behaviour) == len(self.policy_version):
            raise ValueError(
                f"generator {self.generator!r}: {len(self.token_ids)} tokens, {len(self.logp_behaviour)} "
                f"log-probabilities and {len(self.policy_version)} versions must be equally many"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> "Sampled":
        """Return the first ``count`` tokens, as the end of an answer that was stopped there."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logp_behaviour=self.logp_behaviour[:count],
            policy_version=self.policy_version[:count],
            finish_reason="stop",
        )

    def routed_before(self, end: int) -> "Sampled":
        """Return the same tokens without the rows of experts from position ``end`` on."""
        if self.routes is None or (kept := self.routes.tokens < end).all():
            return self
        return replace(self, routes=self.routes.rows(kept) if kept.any() else None)

    @property
    def arrays(self) -> Arrays:
        """Arrays of the tokens by their names on the wire."""
        return {
            "token_ids": self.token_ids,
            "logp_behaviour": self.logp_behaviour,
            "policy_version": self.policy_version,
        }


def nothing(*, finish_reason: FinishReason = "", generator: str = "") -> Sampled:
    """Return a `Sampled` without tokens."""
    return Sampled(
        np.empty(0, np.int32),
        np.empty(0, np.float32),
        np.empty(0, np.int32),
        finish_reason,
        generator=generator,
    )
