"""Selects from a micro-batch the tokens that carry policy gradient, as the objective's inputs."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.update.batching.micro_batch import MicroBatch
from learner.update.objective.scores import Scores
from learner.update.objective.tokens import Tokens

Chosen = Tensor | slice
"""Index that selects targets of a micro-batch."""


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    return torch.from_numpy(array).to(device)


def columns_on_device(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of a micro-batch as tensors on a device, [N] each."""
    return {name: on_device(column, device) for name, column in micro_batch.columns.items()}


def policy_targets(micro_batch: MicroBatch, device: torch.device) -> Chosen:
    """Return the index of the targets that carry policy gradient.

    If all targets carry it, the index is a slice, which copies nothing. Else it has numbers and is no mask, because the
    host would wait for a GPU that counts a mask.
    """
    return slice(None) if micro_batch.policy.all() else on_device(np.flatnonzero(micro_batch.policy), device)


def chosen_tokens(
    micro_batch: MicroBatch, columns: dict[str, Tensor], scored: Scores, policy: Chosen
) -> Tokens:
    """Select the tokens of a micro-batch that carry policy gradient.

    Args:
        micro_batch: targets, of which the tokens are a part.
        columns: columns of the micro-batch on the device.
        scored: scores of its targets.
        policy: index of the targets to select, see `policy_targets`.
    """

    def chosen(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[policy]

    turn = columns["turn"].long()
    sequence = torch.from_numpy(micro_batch.sequence).to(turn.device)
    return Tokens(
        logp_behaviour=columns["logp_behaviour"][policy],
        advantage=columns["advantage"][policy],
        weight=columns["weight"][policy],
        lag=columns["lag"][policy],
        sequence=sequence[policy],
        turn=(sequence * (turn.max() + 2) + turn + 1)[policy],
        logp_proximal=chosen(scored.logp_proximal),
        median_advantage=columns["median_advantage"][policy],
        entropy_signal=chosen(scored.entropy_signal),
        entropy_multiplier=chosen(scored.entropy_multiplier),
        kept=chosen(scored.kept),
        logp_reference=chosen(scored.logp_reference),
        logp_predecessor=chosen(scored.logp_predecessor),
        group_ratio=chosen(scored.group_ratio),
    )
