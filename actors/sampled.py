"""Tokens that a generator has sampled. They stay in this form from the engine to the segment."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from protocol.arrays import Arrays, Float32s, Int32s
from protocol.messages.fields import KvPolicy

FinishReason = Literal["", "stop", "length", "abort"]
"""Reason why an answer ended; "" while it goes on."""


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

    @property
    def arrays(self) -> Arrays:
        """Arrays by their names on the wire."""
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
