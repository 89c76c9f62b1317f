"""A critic with separate weights: a second model with its own DeepSpeed engine and optimizer.

The other form of critic is a value head on the policy, see `learner.update.policy`.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from learner.algorithms.values import value_loss
from learner.settings.critic import CriticConfig
from learner.update.batching.micro_batch import MicroBatch
from learner.update.objective.selection import on_device
from learner.update.policy import decoder_inputs, make_value_head, micro_batch_inputs, without_dropout


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
            Values, float32 [N], in units of the return.
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
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    return CriticModule(lm)


def critic_inputs(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of `CriticModule.forward`."""
    return micro_batch_inputs(micro_batch, device, ("token_ids", "position", "depth", "attends"))


def critic_loss(
    critic: CriticConfig, micro_batch: MicroBatch, values: Tensor, device: torch.device
) -> Tensor:
    """Return the loss of the values [N] of a micro-batch's targets, weighted and summed."""
    clipped = bool(critic.clip_low or critic.clip_high) and "value_before" in micro_batch.columns
    per_token = value_loss(
        values,
        on_device(micro_batch.columns["value_target"], device),
        on_device(micro_batch.columns["value_before"], device) if clipped else None,
        clip_low=critic.clip_low,
        clip_high=critic.clip_high,
    )
    return (on_device(micro_batch.columns["value_weight"], device) * per_token).sum()
