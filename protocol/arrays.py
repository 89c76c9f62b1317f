"""The arrays of a segment: names, dtypes, and the types that the code gives them.

Every token of a trajectory has one element in each of `TOKEN_ARRAYS`. A generator sends those of
`SAMPLED_ARRAYS`; the actor adds the mask. Other arrays may travel beside them under names of their own.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Segment

Arrays = dict[str, NDArray[Any]]
"""Arrays by name, equally long."""
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]

TOKEN_ARRAYS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "action_mask": np.uint8,
    "logp_behaviour": np.float32,
    "policy_version": np.int32,
}
"""What every segment has, with the dtype on the wire. On observations the mask is 0, the log-probability 0 and the
version -1."""
SAMPLED_ARRAYS = ("token_ids", "logp_behaviour", "policy_version")
"""What a generator sends for the tokens that it has sampled."""
ITEM_BYTES = {"i4": 4, "i8": 8, "u1": 1, "f4": 4, "f8": 8}
"""Bytes of one element, by the dtype's code on the wire."""


class SegmentArrays(NamedTuple):
    """A segment's header and its arrays."""

    segment: Segment
    arrays: Arrays
