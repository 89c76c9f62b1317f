"""Adapters of low rank (LoRA) inside a model, and the weights that a layer and its adapter make together.

PEFT puts them in. The model stays of its own class, so whatever computes with it works as before; only the names and
the number of its parameters change. The learner publishes the adapters alone, or merged weights under the names of the
model without them. An exported model is merged, and has a folder with the adapters beside it.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor, nn

from learner.errors import LoraError
from learner.settings.learner import LoraConfig
from protocol.weights.format import WEIGHT

INSTALL = "pip install '.[learner,lora]'"
ADAPTER = "default"
"""PEFT's name of the only adapter of a layer."""
WRAPPED = ".base_layer."
"""Text that PEFT puts between the path of an adapted layer and the names of the layer's own parameters."""


class Adapter(NamedTuple):
    """The adapter of one layer, and how to add it to the layer's weight."""

    down: Tensor
    """A, [rank, inputs]; random at first."""
    up: Tensor
    """B, [outputs, rank]; zero at first."""
    scale: float
    """alpha / rank."""
    transposed: bool
    """True if the layer's weight is [inputs, outputs], as in GPT-2; False if it is [outputs, inputs]."""

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        r"""Return the weight with which the layer alone computes what layer and adapter compute together.

        .. math:: W + \frac{\alpha}{r} B A

        (LoRA, arXiv:2106.09685, equation 3.) The sum is formed in float32 and rounded once, to the dtype of the weight.

        Args:
            weight: weight of the layer.

        Example:
            >>> down, up = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]])
            >>> Adapter(down, up, 0.5, transposed=False).merged(torch.ones(2, 2))
            tensor([[1.5000, 2.0000],
                    [1.0000, 1.0000]])
        """
        # As if nothing was added: -0 + 0 would be 0, which has other bits.
        if not self.up.any():
            return weight
        change = self.scale * (self.up.float() @ self.down.float())
        return (weight.float() + (change.T if self.transposed else change)).to(weight.dtype)


class ParameterCount(NamedTuple):
    """Numbers of parameters: those that are trained, and all of them."""

    trained: int
    whole: int

    def __str__(self) -> str:
        return f"{self.trained:,} of {self.whole:,} parameters ({self.trained / self.whole:.2%})"


def count_parameters(module: nn.Module) -> ParameterCount:
    """Return the numbers of a module's parameters; tied ones count once.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> layer.weight.requires_grad_(False) is None
        False
        >>> print(count_parameters(layer))
        2 of 8 parameters (25.00%)
    """
    # Where DeepSpeed has cut a parameter, it keeps the number for itself.
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in module.parameters()]
    return ParameterCount(sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes))


def linear_layers(lm: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can have an adapter, by their path: those that multiply with a matrix of their own."""
    from transformers.pytorch_utils import Conv1D

    return {path: layer for path, layer in lm.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def chosen_layers(lm: Any, config: LoraConfig) -> list[str]:
    """Return the paths of the layers that get an adapter. Nothing is changed, and no weight is read.

    Raises:
        LoraError: a target names no layer, or one whose weight other layers use, or the rank is above a side of a
            layer.
    """
    layers = linear_layers(lm)
    output = lm.get_output_embeddings()
    if not config.names:
        chosen = [path for path, layer in layers.items() if layer is not output]
    else:
        chosen = [path for path in layers if any(ends_with(path, name) for name in config.names)]
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in layers))
    for name in config.names:
        if not any(ends_with(path, name) for path in layers):
            raise LoraError(
                f"learner.lora.targets has {name!r}, which no linear layer of the model is called; there are: "
                f"{known or 'none'}"
            )
    if not chosen:
        raise LoraError(
            "[learner.lora]: the model has no linear layer that could have an adapter; take it out"
        )
    owners: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for path in chosen:
        _check_layer(path, layers[path], config.rank, owners)
    return chosen


def _check_layer(path: str, layer: Any, rank: int, owners: dict[int, list[str]]) -> None:
    """Refuse an adapter that would be larger than its layer, or that cannot be merged without changing another one."""
    rows, columns = getattr(layer.weight, "ds_shape", layer.weight.shape)
    if rank > min(rows, columns):
        raise LoraError(
            f"learner.lora.rank is {rank}, but the weight of {path} is {rows} x {columns}, so its rank is at most "
            f"{min(rows, columns)}; lower learner.lora.rank to that, or leave the layer out of learner.lora.targets"
        )
    others = [name for name in owners[id(layer.weight)] if name != f"{path}.weight"]
    if others:
        raise LoraError(
            f"learner.lora.targets has {path}, whose weight is also {', '.join(others)}: a merged adapter would change "
            "both; take it out of the targets"
        )


def ends_with(path: str, name: str) -> bool:
    """Return whether the path of a layer ends with this name, by whole parts.

    Example:
        >>> ends_with("model.layers.0.self_attn.q_proj", "self_attn.q_proj"), ends_with("a.qq_proj", "q_proj")
        (True, False)
    """
    return f".{path}".endswith(f".{name}")


def add_adapters(lm: Any, config: LoraConfig) -> None:
    """Put adapters into a model, in place. Its own parameters are frozen; the adapters are what it trains.

    A is random, by torch's random numbers, and B is zero, so the model computes what it computed before.

    Raises:
        LoraError: PEFT is not installed, or see `chosen_layers`.
    """
    chosen = chosen_layers(lm, config)
    try:
        import peft
    except ModuleNotFoundError as error:
        # The error names a package that PEFT itself lacks.
        if error.name != "peft":
            raise
        raise LoraError(
            f"[learner.lora] needs the package peft, which is not installed; run: {INSTALL}"
        ) from None
    from transformers.pytorch_utils import Conv1D

    layers = linear_layers(lm)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale * config.rank,
        # PEFT takes each name of a list for the end of a path, and a string for a regular expression of whole paths.
        target_modules="|".join(re.escape(path) for path in chosen),
        # Sampled tokens are compared with probabilities that were computed without dropout.
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=all(isinstance(layers[path], Conv1D) for path in chosen),
    )
    peft.inject_adapter_in_model(settings, lm, adapter_name=ADAPTER)


def save_adapter(
    lm: Any, factors: Iterable[tuple[str, Tensor]], folder: Path, config: LoraConfig, base: str
) -> None:
    """Write adapters as PEFT does, so that PEFT and ``vllm serve --enable-lora`` load the folder.

    Args:
        lm: model with the adapters.
        factors: A and B of each layer by name, without the scale; see `learner.update.ranks.gathered_adapters`.
        folder: is made unless it is there.
        base: name or folder of the model without them. See `base_name` for what is written of it.
    """
    import peft
    from safetensors.torch import save_file

    tensors = {f"base_model.model.{name}": t.to("cpu", copy=True).contiguous() for name, t in factors}
    layers = [published_name(name).removesuffix(WEIGHT) for name in adapters(lm)]
    below = {path.removesuffix(WRAPPED[:-1]) for path in linear_layers(lm) if ".lora_" not in path}
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale * config.rank,
        target_modules=target_names(layers, sorted(below)),
        bias="none",
        fan_in_fan_out=any(adapter.transposed for adapter in adapters(lm).values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(base),
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    # The weights are written through a temporary file that only its owner may read.
    (folder / "adapter_model.safetensors").chmod((folder / "adapter_config.json").stat().st_mode & 0o777)


_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
"""Part of the path of a model in the hub's cache."""


def base_name(model: str) -> str:
    """Return the name of a model for people elsewhere: the one on the hub, or that of its folder.

    Args:
        model: name on the hub, folder in the hub's cache, or another folder.

    Example:
        >>> base_name("/home/me/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"), base_name("Qwen/Qwen3-0.6B")
        ('Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B')
    """
    if found := _SNAPSHOT.search(Path(model).as_posix() + "/"):
        return f"{found[1]}/{found[2]}"
    return Path(model).resolve().name if Path(model).is_dir() else model


def target_names(chosen: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return names by which PEFT finds the layers chosen and no other: their last parts, or else their paths.

    Args:
        chosen: paths of layers with an adapter.
        layers: paths of all linear layers.

    Example:
        >>> target_names(["a.q", "b.q"], ["a.q", "b.q", "head"]), target_names(["a.q"], ["a.q", "b.q"])
        (['q'], ['a.q'])
    """
    names = sorted({path.rpartition(".")[2] for path in chosen})
    found = {path for path in layers if any(ends_with(path, name) for name in names)}
    return names if found == set(chosen) else list(chosen)


def adapters(lm: nn.Module) -> dict[str, Adapter]:
    """Return the adapters in a model, by the name of the parameter that each is merged into; empty without any."""
    found = {}
    for path, layer in lm.named_modules():
        # No other layer has parts of this name, and a model without adapters needs no PEFT.
        if isinstance(downs := getattr(layer, "lora_A", None), nn.ModuleDict) and ADAPTER in downs:
            module: Any = layer
            found[f"{path}{WRAPPED}weight"] = Adapter(
                downs[ADAPTER].weight,  # type: ignore[arg-type]
                module.lora_B[ADAPTER].weight,
                float(module.scaling[ADAPTER]),
                bool(module.fan_in_fan_out),
            )
    return found


def published_name(name: str) -> str:
    """Return the name of a parameter in the model without adapters.

    Example:
        >>> published_name("model.layers.0.mlp.up_proj.base_layer.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(WRAPPED, ".")


def frozen_digest(lm: nn.Module) -> str:
    """Return a hash of the parameters that a model does not train; "" if it trains all of them.

    A checkpoint holds the adapters only, which mean nothing beside other weights. Where DeepSpeed has cut the model,
    this is a collective call.
    """
    frozen = {name: p for name, p in lm.named_parameters() if not p.requires_grad}
    hashed = blake3(max_threads=blake3.AUTO)
    for name, parameter in frozen.items():
        with _gathered(parameter):
            hashed.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            flat = parameter.detach().to("cpu").contiguous().reshape(-1)
            hashed.update(flat.view(torch.uint8).numpy().data)
    return hashed.hexdigest() if frozen else ""


def _gathered(parameter: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which a parameter is whole, also where DeepSpeed has cut it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])  # type: ignore[no-any-return]
