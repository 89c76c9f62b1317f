"""The policy as a module: token ids in, log-probability and entropy of chosen targets out."""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learner.update.batching import MicroBatch
from learner.update.target_logp import Head, logits_after_head, select, target_logp

log = logging.getLogger(__name__)


class Outputs(NamedTuple):
    """Outputs for each target, float32 [N] each."""

    logp: Tensor
    entropy: Tensor
    value: Tensor | None
    """None without a value head."""


class PolicyModule(nn.Module):
    """A causal language model of Hugging Face that computes only what a policy gradient needs.

    Its dropout is off, because sampled tokens are compared with probabilities that were computed without
    dropout.

    Args:
        lm: the model, without dropout, see `load_policy`.
        after_head: function that the model applies to the output of its last linear layer. Because it is
            known, logits can be computed for chosen positions only, a chunk at a time. None means that it is
            not known: the model's own forward then computes the logits of all positions.
        value_head: whether the module also estimates values, from the last hidden states.
    """

    def __init__(self, lm: nn.Module, *, after_head: Head | None, value_head: bool = False) -> None:
        super().__init__()
        self.lm: Any = lm
        self.after_head = after_head
        self.value_head = make_value_head(self.lm) if value_head else None

    def forward(
        self,
        token_ids: Tensor,
        position: Tensor,
        target: Tensor,
        temperature: Tensor,
        entropy_gradient: bool = False,
        value_gradient: bool = True,
    ) -> Outputs:
        r"""Compute log-probabilities of the targets at their sampling temperature, and values before them.

        .. math:: \log\pi(a) = \log\mathrm{softmax}(z / \tau)_a

        Args:
            token_ids: [B, T] int64, padded on the right with any token id.
            position: [N] int64, input positions b·T + t whose output predicts the targets.
            target: [N] int64, token ids of the targets.
            temperature: [N] float32, > 0.
            entropy_gradient: whether gradient flows through the entropy.
            value_gradient: whether the gradient of the values flows beyond the value head.

        Returns:
            Log-probabilities and entropies in nats, and values in units of the return.
        """
        if self.after_head is not None:
            decoder = self.lm.get_decoder()
            states = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
            hidden = states.flatten(0, 1).index_select(0, position)
            logp, entropy = target_logp(
                hidden,
                self._logits,
                target,
                temperature,
                vocabulary=int(self.lm.config.get_text_config().vocab_size),
                entropy_gradient=entropy_gradient,
            )
        else:
            output = self.lm(
                input_ids=token_ids, use_cache=False, output_hidden_states=self.value_head is not None
            )
            logits = output.logits.flatten(0, 1).index_select(0, position)
            logp, entropy = select(logits, target, temperature, entropy_gradient=entropy_gradient)
            hidden = logits
            if self.value_head is not None:
                hidden = output.hidden_states[-1].flatten(0, 1).index_select(0, position)
        if self.value_head is None:
            return Outputs(logp, entropy, None)
        if not value_gradient:
            hidden = hidden.detach()
        return Outputs(logp, entropy, self.value_head(hidden)[:, 0].float())

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.after_head is not None
        logits: Tensor = self.after_head(self.lm.get_output_embeddings()(hidden))
        return logits


def make_value_head(lm: Any) -> nn.Linear:
    """Make the layer from a hidden state to a value.

    Its weights are zero at first, so that advantages begin as plain returns.
    """
    head = nn.Linear(int(lm.config.get_text_config().hidden_size), 1, dtype=lm.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def micro_batch_inputs(micro_batch: MicroBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Return the arguments of `PolicyModule.forward`."""
    arrays = (micro_batch.token_ids, micro_batch.position, micro_batch.target, micro_batch.temperature)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def load_policy(
    model: str, *, dtype: torch.dtype, gradient_checkpointing: bool = False, value_head: bool = False
) -> PolicyModule:
    """Load a causal language model by Hugging Face name or folder.

    Raises:
        OSError: transformers finds no such model.
    """
    lm = without_dropout(model, dtype)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    after_head = logits_after_head(lm)
    if after_head is None:
        log.warning("what %s does to its logits is not known: computing them at all positions", model)
    # Gradient checkpointing acts in training mode only.
    lm.train()
    return PolicyModule(lm, after_head=after_head, value_head=value_head)


def without_dropout(model: str, dtype: torch.dtype) -> Any:
    """Load a causal language model by Hugging Face name or folder, with all of its dropout set to 0."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model)
    for key, value in list(vars(config.get_text_config()).items()):
        if isinstance(value, float) and key.endswith(("dropout", "pdrop")):
            setattr(config.get_text_config(), key, 0.0)
    lm = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return lm
