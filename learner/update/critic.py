"""A critic with separate weights: a second model with its own DeepSpeed engine and optimizer.

The other form of critic is a value head on the policy, see `learner.update.policy`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from learner.update.batching import MicroBatch
from learner.update.policy import make_value_head, without_dropout


class CriticModule(nn.Module):
    """The decoder of a causal language model with a value head."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.decoder: Any = lm.get_decoder()
        self.value_head = make_value_head(lm)

    def forward(self, token_ids: Tensor, position: Tensor) -> Tensor:
        """Compute the values of the states before the targets.

        Args:
            token_ids: [B, T] int64, padded on the right with any token id.
            position: [N] int64, input positions b·T + t whose output predicts the targets.

        Returns:
            Values, float32 [N], in units of the return.
        """
        states = self.decoder(input_ids=token_ids, use_cache=False).last_hidden_state
        values: Tensor = self.value_head(states.flatten(0, 1)[position])[:, 0].float()
        return values


def load_critic(model: str, *, dtype: torch.dtype, gradient_checkpointing: bool = False) -> CriticModule:
    """Load a critic that begins with the weights of a causal language model."""
    lm = without_dropout(model, dtype)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    return CriticModule(lm)


def critic_inputs(micro_batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the arguments of `CriticModule.forward`."""
    return (
        torch.from_numpy(micro_batch.token_ids).to(device),
        torch.from_numpy(micro_batch.position).to(device),
    )
