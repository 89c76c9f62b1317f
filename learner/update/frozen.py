"""Frozen copies of the policy that the objective compares with: the reference, and the predecessor.

Every rank holds a full copy in the learner's dtype.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from learner.model.routes import RouteReplay
from learner.update.batching.batch import Batch
from learner.update.batching.micro_batch import MicroBatch
from learner.update.device.fused_layers import Agree, fuse_layers
from learner.update.policy import PolicyModule, micro_batch_inputs
from protocol.files import whole_file


class FrozenPolicy:
    """A policy that never learns; its weights can be replaced.

    With adapters (`learner.lora`) it has its own copies of them, and only these are replaced and saved.

    Args:
        module: the policy, which this object takes over; its parameters get no gradient any more.
        device: device on which the learner computes.
        given_routes: whether it computes with the experts that generators chose, as the policy does that it is compared
            with. Otherwise the distance of equal weights would not be 0.
        agree: see `learner.update.device.fused_layers.fuse_layers`.
    """

    def __init__(
        self, module: PolicyModule, device: torch.device, *, given_routes: bool = False, agree: Agree = bool
    ) -> None:
        self._trained = [name for name, p in module.lm.named_parameters() if p.requires_grad]
        self._module = module.requires_grad_(False).to(device)
        fuse_layers(module.lm, device, agree)
        self._module.find_shortcuts()
        self._device = device
        self._routes = RouteReplay(module.lm, "behaviour") if given_routes else None

    @torch.no_grad()
    def score(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the targets of each micro-batch of a batch, [N] each."""
        if self._routes is not None:
            self._routes.begin(len(batch.token_ids), batch.routes)
        scores = [self._score(micro_batch) for micro_batch in micro_batches]
        if self._routes is not None:
            self._routes.end()
        return scores

    def _score(self, micro_batch: MicroBatch) -> Tensor:
        if self._routes is not None:
            self._routes.prepare(micro_batch, self._device)
        logp: Tensor = self._module(**micro_batch_inputs(micro_batch, self._device)).logp
        return logp

    @torch.no_grad()
    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights into the policy: see `learner.update.gathering.trained_weights`."""
        own = dict(self._module.lm.named_parameters()) | dict(self._module.lm.named_buffers())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def save(self, path: Path) -> None:
        """Write the weights, or the adapters in their place, as safetensors."""
        from safetensors.torch import save_file

        own = dict(self._module.lm.named_parameters())
        tensors = {name: own[name].detach().cpu().contiguous() for name in self._trained}
        with whole_file(path) as partial:
            save_file(tensors, partial)

    def load(self, path: Path) -> None:
        """Load the weights that `save` wrote.

        Raises:
            FileNotFoundError: the checkpoint was written without this policy.
        """
        from safetensors.torch import load_file

        self.replace(load_file(path).items())
