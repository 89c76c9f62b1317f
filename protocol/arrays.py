"""The arrays of a segment: their names, dtypes and Python types.

Every token of a trajectory has one element in each of `TOKEN_ARRAYS`. A generator sends the arrays of
`SAMPLED_ARRAYS`, and the actor adds the mask. Further arrays, of other lengths, may travel in the body.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.messages.episodes import Segment

Arrays = dict[str, NDArray[Any]]
"""Arrays by name, equally long."""
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Experts = NDArray[np.uint8] | NDArray[np.int16]
"""Numbers of experts: uint8 for at most 256 in a layer, else int16."""
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]

TOKEN_ARRAYS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "action_mask": np.uint8,
    "logp_behaviour": np.float32,
    "policy_version": np.int32,
}
"""Arrays that every segment has, with the dtype on the wire.

On observation tokens the mask is 0, the log-probability 0, and the version -1.
"""
SAMPLED_ARRAYS = ("token_ids", "logp_behaviour", "policy_version")
"""Arrays that a generator sends for the tokens it has sampled."""
ROUTED_EXPERTS, ROUTED_TOKEN = "routed_experts", "routed_token"
"""Optional arrays of a mixture of experts: rows of experts, and the token of each row.

A row has the experts that one token went through as an input of the generator, for all layers of the model behind each
other, equally many in each layer. Rows travel flat. `ROUTED_TOKEN`, int32, says which token each row belongs to: in a
Chunk by its position in the prompt and its answer, in a Segment by that in the trajectory.
"""
MAX_ROUTE_BYTES = 8 * 2**20
"""Bytes of rows in one message. What is more goes into a further message, which may have no tokens."""
ITEM_BYTES = {"i2": 2, "i4": 4, "i8": 8, "u1": 1, "f4": 4, "f8": 8}
"""Bytes of one element, by the dtype's name on the wire."""


class SegmentArrays(NamedTuple):
    """A segment's header and its arrays."""

    segment: Segment
    arrays: Arrays
