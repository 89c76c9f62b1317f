"""Input of one forward and backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import Float32s, Int64s

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
        held=[],
        begins=np.zeros(0, dtype=np.int64),
    )
