"""The policy as a module: token ids in, log-probability and entropy of chosen targets out."""

import logging
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from learner.errors import NoisyModel
from learner.run_files import let_all_read
from learner.settings.learner import LoraConfig
from learner.update.batch import Batch
from learner.update.devices import Agree, fuse_layers
from learner.update.lora import add_adapters
from learner.update.micro_batches import MicroBatch, tree_attention, tree_row
from learner.update.routed_experts import ForcedRoutes
from learner.update.target_logp import Head, logits_after_head, select, target_logp
from protocol.files import whole_file

log = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest norm of a difference that counts as rounding in `sharing_width`, relative to the norm of the hidden state."""

NOISE = {"jitter_noise": 0.0, "input_jitter_noise": 0.0, "moe_jitter_eps": None}
"""Attributes by which routers of mixtures of experts draw noise while they train, and the values without noise."""
NOISE_TOKENS = 16
"""Tokens of the short pass that looks for noise."""


class Outputs(NamedTuple):
    """Outputs for each target, float32 [N] each."""

    logp: Tensor
    entropy: Tensor
    value: Tensor | None
    """None without a value head."""


class PolicyModule(nn.Module):
    """A causal language model of Hugging Face that computes only what a policy gradient needs.

    Its dropout and the noise of its routers are off, because sampled tokens are compared with probabilities that were
    computed without them.

    Args:
        lm: the model, without dropout, see `load_policy`.
        after_head: function that the model applies to the output of its last linear layer. Because it is
            known, logits can be computed for chosen positions only, a chunk at a time. None means that it is
            not known (yet, see `find_shortcuts`): the model's own forward then computes the logits of all positions.
        value_head: whether the module also estimates values, from the last hidden states.
        sharing: width of the model if trajectories can share rows, see `sharing_width`; 0 if they cannot.
    """

    def __init__(
        self, lm: nn.Module, *, after_head: Head | None = None, value_head: bool = False, sharing: int = 0
    ) -> None:
        super().__init__()
        self.lm: Any = lm
        self.after_head = after_head
        self.sharing = sharing
        self.value_head = make_value_head(self.lm) if value_head else None

    def find_shortcuts(self) -> None:
        """Find out by some short passes what the model does to its logits, and whether trajectories can share rows.

        Call it where the model computes faster than in the host's memory, and its weights need not be whole: after
        DeepSpeed has moved and cut it. There it is a collective call.

        Raises:
            NoisyModel: the model draws random numbers while it trains.
        """
        training = self.lm.training
        if is_noisy(self.lm):
            raise NoisyModel(
                f"{type(self.lm).__name__} computes other numbers in training mode than a generator, because it draws "
                "random ones, so no probability of a sampled token could be compared; choose another model"
            )
        self.after_head = logits_after_head(self.lm)
        if self.after_head is None:
            log.warning("what the model does to its logits is not known: computing them at all positions")
        self.sharing = sharing_width(self.lm)
        self.lm.train(training)

    def forward(
        self,
        token_ids: Tensor,
        position: Tensor,
        target: Tensor,
        temperature: Tensor,
        entropy_gradient: bool = False,
        value_gradient: bool = True,
        depth: Tensor | None = None,
        attends: Tensor | None = None,
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
            depth: [B, T] int64, position of each token in its trajectory; None: its index in the row.
            attends: [B, T, T] bool, positions that each position attends to; None: all up to itself.

        Returns:
            Log-probabilities and entropies in nats, and values in units of the return, or logits of probabilities
            where the critic's target is "success".
        """
        inputs = decoder_inputs(self.lm, token_ids, depth, attends)
        if self.after_head is not None:
            decoder = self.lm.get_decoder()
            states = decoder(**inputs).last_hidden_state
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
            output = self.lm(**inputs, output_hidden_states=self.value_head is not None)
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


def decoder_inputs(
    model: nn.Module, token_ids: Tensor, depth: Tensor | None, attends: Tensor | None
) -> dict[str, Any]:
    """Return the keyword arguments of a model of transformers, see `PolicyModule.forward`."""
    inputs: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
    if depth is not None and attends is not None:
        # A mask that is added to the scores works in every attention that takes one.
        dtype = next(model.parameters()).dtype
        added = torch.zeros(attends.shape, dtype=dtype, device=attends.device)
        mask = added.masked_fill_(~attends, torch.finfo(dtype).min)[:, None]
        inputs |= {"position_ids": depth, "attention_mask": mask}
    return inputs


INPUTS = ("token_ids", "position", "target", "temperature", "depth", "attends")
"""Fields of a micro-batch that are arguments of `PolicyModule.forward`."""


def micro_batch_inputs(
    micro_batch: MicroBatch, device: torch.device, names: Sequence[str] = INPUTS
) -> dict[str, Tensor]:
    """Return fields of a micro-batch as keyword arguments of a module, without those that are None."""
    arrays = {name: getattr(micro_batch, name) for name in names}
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items() if array is not None}


@torch.no_grad()
def is_noisy(lm: Any) -> bool:
    """Return whether a model computes other numbers in training mode than it samples with."""
    device = next(lm.parameters()).device
    ids = torch.arange(NOISE_TOKENS, device=device)[None] % int(lm.config.get_text_config().vocab_size)

    def logits(*, training: bool) -> Tensor:
        lm.train(training)
        found: Tensor = lm(input_ids=ids, use_cache=False).logits.float()
        return found

    was_training = lm.training
    noisy, quiet = logits(training=True), logits(training=False)
    lm.train(was_training)
    return bool((noisy - quiet).norm() > PROBE_TOLERANCE[lm.dtype] * quiet.norm())


@torch.no_grad()
def sharing_width(lm: Any) -> int:
    """Return the width of a model's residual stream, or 0 if trajectories cannot share rows with it.

    They can if the model attends where a mask says, at positions that it is told: its outputs for a row with a
    shared beginning must be those for each trajectory alone. Models with local attention or a recurrent state
    cannot, and neither can attention that takes no mask.
    """
    config = lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    local = kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None
    # GPT-Neo has names of its own, and its local attention goes by the place in the row.
    local |= "local" in (getattr(config, "attention_layers", None) or [])
    if local or config._attn_implementation not in ("sdpa", "eager"):
        return 0
    vocabulary = int(config.vocab_size)
    one, other = (np.array(ids) % vocabulary for ids in ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8)))
    row = tree_row([0, 1], [one, other])
    depth, attends = (
        torch.from_numpy(row.depth)[None],
        torch.from_numpy(tree_attention([row], row.token_ids.size)),
    )
    lm.eval()

    def states(ids: Tensor, depth: Tensor | None = None, attends: Tensor | None = None) -> Tensor:
        device = next(lm.parameters()).device
        moved = [None if tensor is None else tensor.to(device) for tensor in (depth, attends)]
        inputs = decoder_inputs(lm, ids[None].to(device), *moved)
        found: Tensor = lm.get_decoder()(**inputs).last_hidden_state[0].float()
        return found

    tolerance = PROBE_TOLERANCE[lm.dtype]
    try:
        shared = states(torch.from_numpy(row.token_ids), depth, attends)
        alone = [states(torch.from_numpy(ids)) for ids in (one, other)]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return 0
    equal = all(
        ((shared[torch.from_numpy(places)] - expected).norm(dim=1) <= tolerance * expected.norm(dim=1)).all()
        for places, expected in zip(row.places, alone, strict=True)
    )
    return int(config.hidden_size) if equal else 0


def load_policy(
    model: str,
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    value_head: bool = False,
    lora: LoraConfig | None = None,
    shards: AbstractContextManager[None] | None = None,
) -> PolicyModule:
    """Load a causal language model by Hugging Face name or folder. It knows no shortcuts yet.

    Args:
        lora: adapters to train in place of the model's weights; a value head is trained whole. None: all weights are.
        shards: see `learner.update.ranks.cut_while_loading`; None: the model is loaded whole.

    Raises:
        OSError: transformers finds no such model.
        LoraError: these adapters cannot be put into it.
    """
    lm = without_dropout(model, dtype, shards)
    if gradient_checkpointing:
        recompute_activations(lm)
    if lora is not None:
        add_adapters(lm, lora)
    # Gradient checkpointing acts in training mode only.
    lm.train()
    return PolicyModule(lm, value_head=value_head)


def recompute_activations(lm: Any) -> None:
    """Let a model of transformers compute activations again in the backward pass, in place of keeping them."""
    how = {"use_reentrant": False}
    # transformers 5.24 has both names, and warns of the earlier one.
    if hasattr(lm, "activation_checkpointing_enable"):
        lm.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def without_dropout(
    model: str, dtype: torch.dtype, shards: AbstractContextManager[None] | None = None
) -> Any:
    """Load a causal language model by Hugging Face name or folder, without dropout and without noise in its routers.

    Args:
        shards: see `load_policy`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model)
    for key, value in list(vars(config.get_text_config()).items()):
        if isinstance(value, float) and key.endswith(("dropout", "pdrop")):
            setattr(config.get_text_config(), key, 0.0)
    # torch's attention knows no cap on its scores (Gemma-2) and would leave it out without a word.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    attention = {"attn_implementation": "eager"} if capped else {}
    with shards or nullcontext():
        lm = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype, **attention)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in NOISE.items():
            if hasattr(module, name):
                setattr(module, name, value)
    return lm


class FrozenPolicy:
    """A policy that never learns; its weights can be replaced.

    With adapters (`learner.lora`) it has its own copies of them, and only these are replaced and saved.

    Args:
        module: the policy, which this object takes over; its parameters get no gradient any more.
        device: device on which the learner computes.
        given_routes: whether it computes with the experts that generators chose, as the policy does that it is compared
            with. Otherwise the distance of equal weights would not be 0.
        agree: see `learner.update.devices.fuse_layers`.
        fixed: whether its weights never change, as those of a teacher. Then checkpoints do not have them.
    """

    def __init__(
        self,
        module: PolicyModule,
        device: torch.device,
        *,
        given_routes: bool = False,
        agree: Agree = bool,
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self._trained = [name for name, p in module.lm.named_parameters() if p.requires_grad]
        self._module = module.requires_grad_(False).to(device)
        fuse_layers(module.lm, device, agree)
        self._module.find_shortcuts()
        self._device = device
        self._routes = ForcedRoutes(module.lm, "behaviour") if given_routes else None

    @torch.no_grad()
    def score(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the targets of each micro-batch of a batch, [N] each."""
        if self._routes is not None:
            self._routes.begin_batch(len(batch.token_ids), batch.routes)
        scores = [self._score(micro_batch) for micro_batch in micro_batches]
        if self._routes is not None:
            self._routes.end_batch()
        return scores

    def _score(self, micro_batch: MicroBatch) -> Tensor:
        if self._routes is not None:
            self._routes.force_next_pass(micro_batch, self._device)
        return self.outputs(micro_batch).logp

    def outputs(self, micro_batch: MicroBatch) -> Outputs:
        """Return what the policy says of the targets of a micro-batch."""
        outputs: Outputs = self._module(**micro_batch_inputs(micro_batch, self._device))
        return outputs

    @torch.no_grad()
    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights into the policy: see `learner.update.ranks.trained_weights`."""
        own = dict(self._module.lm.named_parameters()) | dict(self._module.lm.named_buffers())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def save(self, path: Path) -> None:
        """Write the weights, or the adapters in their place, as safetensors; nothing if they never change."""
        if self._fixed:
            return
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
        if self._fixed:
            return
        from safetensors.torch import load_file

        self.replace(load_file(path).items())


TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab*", "merges.txt", "*.model",
)  # fmt: skip


def save_pretrained(lm: Any, weights: Iterable[tuple[str, Tensor]], folder: Path, *, source: str) -> None:
    """Write a model as a Hugging Face folder, with the tokenizer's files.

    Args:
        lm: model of transformers, for its configuration.
        weights: whole tensors under the names of the folder; see `gathering.gathered_weights`.
        folder: is made unless it is there.
        source: Hugging Face name or folder of the model that was trained, which has the tokenizer.
    """
    state = {name: tensor.to("cpu", copy=True) for name, tensor in weights}
    folder.mkdir(parents=True, exist_ok=True)
    # The names are those of the folder already.
    lm.save_pretrained(folder, state_dict=state, save_original_format=False)
    let_all_read(folder)
    _copy_tokenizer(source, folder)


def _copy_tokenizer(source: str, folder: Path) -> None:
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    for pattern in TOKENIZER_FILES:
        for path in Path(source).glob(pattern):
            if path.is_file() and path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
