"""Compares the generators' log-probabilities with the learner's, before anything is learned from them.

Both compute the same model with other kernels. If one of them leaves a term out, the run trains on a policy that nobody
samples from, and no metric of a method says so. The comparison finds that for any architecture, on the first batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from learner.errors import SamplerDiffers
from learner.trajectory import Trajectory
from protocol.arrays import Float32s

FloatType = Literal["float32", "bfloat16", "float16"]
ROUNDING: dict[FloatType, float] = {"float32": 5e-4, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean of |learner's - generator's log-probability| that rounding explains, in nats, by the coarser float type.

Kernels that compute the same differ by 1e-6 to 1e-5 in float32 and by 0.005 to 0.03 in bfloat16, in the mean over the
tokens of a batch. The limits leave room for mixtures of experts, where a tie may choose another expert.
"""
LEAST_TOKENS = 16
"""Tokens below which a mean says nothing."""


@dataclass(frozen=True)
class SamplerGap:
    """Difference between the learner's and the generators' log-probabilities of tokens without lag."""

    tokens: int
    """Number of tokens compared."""
    mean: float
    """Mean of the absolute difference, in nats."""
    worst: float
    """Largest absolute difference, in nats."""
    where: str
    """The token with the largest difference: trajectory, place and id."""
    learner: float
    """The learner's log-probability of that token."""
    generator: float
    """The generator's log-probability of that token."""


def sampler_gap(
    trajectories: Sequence[Trajectory],
    token: NDArray[np.int64],
    *,
    learner: Float32s,
    generator: Float32s,
) -> SamplerGap | None:
    """Compare two log-probabilities of sampled tokens. Return None if they are copies, or too few to say anything.

    Args:
        trajectories: those of the batch, one behind the other.
        token: index of each compared token among the tokens of all trajectories, [N].
        learner: log-probabilities of the policy version that sampled them, computed by the learner, [N], in nats.
        generator: log-probabilities that came with the tokens, [N], in nats.

    Example:
        >>> sampler_gap([], np.zeros(0, dtype=np.int64), learner=np.zeros(0, "f4"), generator=np.zeros(0, "f4"))
    """
    # Equal numbers were copied and not computed, as with algorithm.proximal = "behaviour".
    if len(token) < LEAST_TOKENS or np.array_equal(learner, generator):
        return None
    # Differences of infinite or missing numbers are not rounding, whatever the limit is.
    difference = np.nan_to_num(np.abs(learner.astype(np.float64) - generator), nan=np.inf)
    at = int(difference.argmax())
    starts = np.cumsum([0, *(len(t.token_ids) for t in trajectories)])
    owner = int(np.searchsorted(starts, token[at], side="right")) - 1
    place = int(token[at] - starts[owner])
    return SamplerGap(
        tokens=len(token),
        mean=float(difference.mean()),
        worst=float(difference[at]),
        where=f"token {place} (id {int(trajectories[owner].token_ids[place])}) of {trajectories[owner].trajectory_id}",
        learner=float(learner[at]),
        generator=float(generator[at]),
    )


def check_sampler(gap: SamplerGap, limit: float) -> None:
    """Refuse to train if the generators sample from another policy than the learner computes.

    Args:
        gap: difference in the first batch.
        limit: largest mean that is accepted, in nats.

    Raises:
        SamplerDiffers: the mean difference is above the limit, or is not a number.
    """
    if gap.mean <= limit:
        return
    raise SamplerDiffers(
        f"the generators sample from another policy than the learner computes: over {gap.tokens} tokens of the first "
        f"batch their log-probabilities differ by {gap.mean:.2g} nats in the mean, and rounding explains {limit:.2g}. "
        f"The largest difference is {gap.worst:.2g}, at {gap.where}: {gap.learner:.4f} in the learner, "
        f"{gap.generator:.4f} from the generator. Nothing was trained. Look for what only one side computes: a cap or "
        "a window of the attention, a scale of the rotary embedding, quantised weights, another version of the model "
        "on a server. If the difference is wanted, for example with quantised generators, set learner.sampler_gap to "
        "the mean in nats that you accept"
    )


def limit_of(setting: float | Literal["auto"], learner: FloatType, generator: FloatType) -> float:
    """Return the largest mean difference that `learner.sampler_gap` accepts, in nats.

    Args:
        setting: the setting; "auto" takes what rounding explains.
        learner: float type in which the learner computes.
        generator: float type in which generators compute.

    Example:
        >>> limit_of("auto", "float32", "bfloat16"), limit_of(0.3, "float32", "float32")
        (0.1, 0.3)
    """
    return max(ROUNDING[learner], ROUNDING[generator]) if setting == "auto" else setting
