"""A critic with separate weights: a second model with its own DeepSpeed engine and optimizer.

The other form of critic is a value head on the policy, see `learner.update.policy`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.advantages import Estimates, TokenAdvantages
from learner.algorithms.ratios import LOG_RATIO_LIMIT
from learner.algorithms.values import rate_loss, value_loss
from learner.settings.algorithm import CriticConfig
from learner.trajectory import Trajectory
from learner.update.adaptive import Forward, on_device
from learner.update.batch import Batch
from learner.update.micro_batches import MicroBatch
from learner.update.policy import (
    decoder_inputs,
    make_value_head,
    micro_batch_inputs,
    recompute_activations,
    without_dropout,
)
from learner.update.report import TokenRecorder


class CriticModule(nn.Module):
    """The decoder of a causal language model with a value head."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.decoder: Any = lm.get_decoder()
        self.value_head = make_value_head(lm)

    def forward(
        self,
        token_ids: Tensor,
        position: Tensor,
        depth: Tensor | None = None,
        attends: Tensor | None = None,
    ) -> Tensor:
        """Compute the values of the states before the targets.

        Args:
            token_ids: [B, T] int64, padded on the right with any token id.
            position: [N] int64, input positions b·T + t whose output predicts the targets.
            depth: [B, T] int64, see `learner.update.policy.PolicyModule.forward`.
            attends: [B, T, T] bool, see there.

        Returns:
            Values, float32 [N], in units of the return, or logits of probabilities where the target is "success".
        """
        inputs = decoder_inputs(self.decoder, token_ids, depth, attends)
        states = self.decoder(**inputs).last_hidden_state
        values: Tensor = self.value_head(states.flatten(0, 1)[position])[:, 0].float()
        return values


def load_critic(
    model: str,
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    shards: AbstractContextManager[None] | None = None,
) -> CriticModule:
    """Load a critic that begins with the weights of a causal language model.

    Args:
        shards: see `learner.update.policy.load_policy`.
    """
    lm = without_dropout(model, dtype, shards)
    if gradient_checkpointing:
        recompute_activations(lm)
    lm.train()
    return CriticModule(lm)


def critic_inputs(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of `CriticModule.forward`."""
    return micro_batch_inputs(micro_batch, device, ("token_ids", "position", "depth", "attends"))


def critic_loss(critic: CriticConfig, micro_batch: MicroBatch, said: Tensor, device: torch.device) -> Tensor:
    """Return the loss of what the critic says [N] of a micro-batch's targets, weighted and summed."""
    target, weight = (
        on_device(micro_batch.columns[name], device) for name in ("value_target", "value_weight")
    )
    if critic.target == "success":
        return (weight * rate_loss(said, target)).sum()
    clipped = bool(critic.clip_low or critic.clip_high) and "value_before" in micro_batch.columns
    per_token = value_loss(
        said,
        target,
        on_device(micro_batch.columns["value_before"], device) if clipped else None,
        clip_low=critic.clip_low,
        clip_high=critic.clip_high,
    )
    return (weight * per_token).sum()


def as_values(critic: CriticConfig | None, said: Tensor) -> Tensor:
    """Return the values that belong to what the critic's output says, without gradient: itself, or a probability."""
    said = said.detach()
    return said.sigmoid() if critic is not None and critic.target == "success" else said


REMEMBERED = 65536
"""Largest number of unfinished trajectories whose values are kept; the oldest are removed first."""


def everything(trajectories: Sequence[Trajectory]) -> TokenAdvantages:
    """Return a `TokenAdvantages` that makes the learner look at all action tokens that are not auxiliary, and
    train on none."""
    total = sum(len(t) for t in trajectories)
    zeros, none = np.zeros(total), np.zeros(total, dtype=np.bool_)
    actions = np.concatenate([t.learned_mask for t in trajectories])
    return TokenAdvantages(
        advantage=zeros, median_advantage=zeros, policy=none, value=actions, value_target=zeros
    )


def scatter_estimates(batch: Batch, rows: Mapping[str, NDArray[Any]]) -> Estimates:
    """Expand numbers per seen token to numbers per token of all rows."""
    value, ratio = np.zeros(len(batch.token_ids)), np.ones(len(batch.token_ids))
    value[batch.seen_mask] = rows["value"]
    log_ratio = rows["logp_current"] - batch.columns["logp_behaviour"][batch.seen_mask]
    ratio[batch.seen_mask] = np.exp(log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return Estimates(value=value, ratio_proximal_behaviour=ratio)


class ValueMemory:
    """Values of tokens from when their window was trained, for the value clip (T-PPO, arXiv:2506.15050)."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, NDArray[np.float64]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def recall(self, trajectories: Sequence[Trajectory], now: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return values of all rows [ΣT]: remembered ones for earlier windows, ``now`` for the present ones.

        The values of unfinished trajectories are remembered; the values of finished ones are deleted.
        """
        rows = []
        start = 0
        for t in trajectories:
            row = np.array(now[start : start + len(t)], dtype=np.float64)
            start += len(t)
            earlier = self._values.pop(t.trajectory_id, row[: t.window_start])
            known = min(len(earlier), t.window_start)
            row[:known] = earlier[:known]
            if t.status == "unfinished":
                self._values[t.trajectory_id] = row
            rows.append(row)
        while len(self._values) > REMEMBERED:
            self._values.popitem(last=False)
        return np.concatenate(rows).astype(np.float32)

    def encode(self) -> bytes:
        """Encode for the checkpoint: trajectory ids, and their values as little-endian doubles."""
        rows = [(name, row.astype("<f8").tobytes()) for name, row in self._values.items()]
        return msgspec.msgpack.encode(rows)

    def restore(self, data: bytes) -> None:
        """Restore the values that `encode` returned."""
        rows = msgspec.msgpack.decode(data, type=list[tuple[str, bytes]])
        self._values = OrderedDict((name, np.frombuffer(row, "<f8")) for name, row in rows)


@torch.no_grad()
def estimate_tokens(
    forward: Forward,
    critic: Any,
    micro_batches: Sequence[MicroBatch],
    recorder: TokenRecorder,
    *,
    device: torch.device,
    config: CriticConfig | None,
) -> dict[str, NDArray[Any]]:
    """Return values and log-probabilities of the batch's seen tokens under the present weights.

    This is a collective call. The log-probabilities are 0 where a separate critic does not need them.

    Args:
        forward: the policy, whose value head is the critic if there is no separate one.
        critic: DeepSpeed engine of a separate critic; None without one. Without a value head, too, values are 0.
        micro_batches: micro-batches of this rank, which have each seen token once over all ranks.
        recorder: an empty recorder for the batch's seen tokens.
        device: device on which this rank computes.
        config: settings of the critic; None: there is none.
    """
    vtrace = config is not None and config.target == "vtrace"
    for micro_batch in micro_batches:
        if critic is not None:
            said = critic(**critic_inputs(micro_batch, device))
            logp = forward(micro_batch).logp if vtrace else torch.zeros_like(said)
        else:
            logp, _, head = forward(micro_batch)
            said = torch.zeros_like(logp) if head is None else head
        recorder.record_rows(micro_batch, {"value": as_values(config, said), "logp_current": logp})
    return recorder.gathered("value", "logp_current")
