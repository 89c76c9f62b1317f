"""Tokens that a generator has sampled, from the engine to the segment they end up in."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from protocol.arrays import Arrays, Float32s, Int32s
from protocol.messages import KvPolicy

FinishReason = Literal["", "stop", "length", "abort"]
"""Why an answer ended; "" while it goes on."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Newly sampled tokens, in order. The three arrays are equally long; they may be empty.

    Example:
        >>> some = Sampled(np.array([5, 7], "i4"), np.array([-0.5, -1.0], "f4"), np.array([3, 3], "i4"))
        >>> len(some), some.finish_reason
        (2, '')
    """

    token_ids: Int32s
    logp_behaviour: Float32s
    """Natural-log probability of each token under the distribution sampled from: after temperature, top_p, top_k."""
    policy_version: Int32s
    """Policy version that sampled each token."""
    finish_reason: FinishReason = ""
    """An end token is among the ids."""
    kv: KvPolicy = "recomputed"
    """What became of cached keys and values at the last weight update."""
    generator: str = ""
    """Peer that sampled them."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logp_behaviour) == len(self.policy_version):
            raise ValueError(
                f"generator {self.generator!r}: {len(self.token_ids)} tokens, {len(self.logp_behaviour)} "
                f"log-probabilities and {len(self.policy_version)} versions must be equally many"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def arrays(self) -> Arrays:
        """The arrays by the names that they have on the wire."""
        return {
            "token_ids": self.token_ids,
            "logp_behaviour": self.logp_behaviour,
            "policy_version": self.policy_version,
        }


def nothing(*, finish_reason: FinishReason = "", generator: str = "") -> Sampled:
    """Return no tokens, with a reason why there are none."""
    return Sampled(
        np.empty(0, np.int32),
        np.empty(0, np.float32),
        np.empty(0, np.int32),
        finish_reason,
        generator=generator,
    )
