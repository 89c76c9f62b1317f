"""Holds a run file against its model's config.json: the longest sequence, and the parts that it can be divided into."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.run_file.sections import RunConfig


def too_long_model(config: RunConfig, context: int | None, folder: Path | None) -> Iterator[str]:
    """Yield the refusal of a `max_model_len` beyond the model's own limit."""
    length = config.generator.max_model_len
    if context is not None and length > context:
        yield (
            f"generator.max_model_len is {length}, but the model's own limit is {context} "
            f"({folder}/config.json); lower it to at most {context}"
        )


def undivided_heads(config: RunConfig, described: dict[str, Any]) -> Iterator[str]:
    """Yield the refusal of a `tensor_parallel_size` that does not divide the model's attention heads.

    Args:
        described: content of the model's config.json; may be empty.
    """
    size, part = config.generator.tensor_parallel_size, described.get("text_config") or described
    heads = part.get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        possible = [n for n in range(1, heads + 1) if heads % n == 0]
        yield (
            f"generator.tensor_parallel_size is {size}, but the model has {heads} attention heads, which it must "
            f"divide; use {', '.join(map(str, possible[:-1]))} or {heads}"
        )


EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that may hold the number of experts of a layer."""


def experts_of(described: dict[str, Any]) -> int:
    """Return the experts of a layer by the content of config.json; 0 if it has none."""
    part = described.get("text_config") or described
    return max([part[key] for key in EXPERT_KEYS if isinstance(part.get(key), int)], default=0)


def without_experts(config: RunConfig, described: dict[str, Any], folder: Path | None) -> Iterator[str]:
    """Yield the refusal of recorded or replayed routes for a model that has no experts.

    Args:
        described: content of the model's config.json; empty if it is not there yet.
        folder: the model's folder; None if it is not there yet.
    """
    routes, made_here = config.learner.algorithm.routes, not config.model.path
    if experts_of(described) >= 2 or not (described or made_here):
        return
    what = f"{folder or 'the tiny model'} is no mixture of experts, so there is no choice of experts to"
    if routes != "current":
        yield f'learner.algorithm.routes is "{routes}", but {what} replay; set it to "current"'
    elif config.generator.routes:
        yield f"generator.routes is true, but {what} record; leave it out"


def quantised(described: dict[str, Any], folder: Path | None) -> Iterator[str]:
    """Yield the refusal of a model whose weights are quantised: they cannot be trained.

    Example:
        >>> list(quantised({"quantization_config": {"quant_method": "fp8"}}, Path("m")))
        ["model.path: m is quantised (fp8), and such weights cannot be trained; take the model's bfloat16 version"]
    """
    how = described.get("quantization_config")
    if isinstance(how, dict):
        kind = how.get("quant_method", "by an unknown method")
        yield (
            f"model.path: {folder} is quantised ({kind}), and such weights cannot be trained; take the model's "
            "bfloat16 version"
        )
