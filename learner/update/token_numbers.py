"""Numbers that an update computed of the tokens of its batch, for those who look at single tokens afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from learner.algorithms.ratios import importance_ratio
from learner.update.batch import Batch
from protocol.arrays import Float32s, Int64s


@dataclass(frozen=True, eq=False)
class TokenNumbers:
    """What the update made of each token, in float32, as the loss had it. Of several passes it is the last one."""

    batch: Batch
    rows: Mapping[str, NDArray[np.float32]] = field(repr=False)
    """`learner.update.report.ROWS`, over the seen tokens of the batch, [M]."""

    @cached_property
    def _seen(self) -> NDArray[np.bool_]:
        """Seen tokens of which the policy's objective was formed, [M]."""
        found: NDArray[np.bool_] = self.rows["seen"] > 0
        return found

    @cached_property
    def place(self) -> Int64s:
        """Index in the batch of each token of which the policy's objective was formed, [N]."""
        return np.flatnonzero(self.batch.seen_mask)[self._seen]

    def trained(self, name: str) -> Float32s:
        """Return a number of the tokens at `place`, [N].

        Args:
            name: a row, or ``ratio`` for current / behaviour, or ``ratio_proximal_behaviour``.
        """
        if name == "ratio":
            return self._ratio("logp_current")
        if name == "ratio_proximal_behaviour":
            return self._ratio("logp_proximal")
        row = self.rows[name]
        return row if len(self.place) == len(row) else row[self._seen]

    def _ratio(self, above: str) -> Float32s:
        one, other = (torch.from_numpy(self.trained(name)) for name in (above, "logp_behaviour"))
        ratio: Float32s = importance_ratio(one, other).numpy()
        return ratio
