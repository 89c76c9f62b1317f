"""Holds a run file against its model: the longest sequence, the parts it divides into, its experts, its adapters.

Without its experts a token has 13 bytes, and with them some hundred, so limits are met that are far away otherwise.
The names and sizes of the layers that adapters change follow from the model's config.json, so the weights need not be
there. ``python -m launch.preflight.model_limits FOLDER LORA`` tries adapters in a process of its own.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from broker.core.records import ENVELOPE_BYTES
from launch.errors import ConfigError
from launch.preflight.trial_process import NoAnswer, ask
from launch.run_file.sections import RunConfig
from learner.settings.learner import LoraConfig
from protocol.arrays import TOKEN_ARRAYS
from protocol.codec import MAX_MESSAGE_BYTES


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


CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
"""Keys of config.json that may hold the number of experts that a token goes through in a layer."""
SMALL = 256
"""Experts of a layer up to which the number of one travels as a byte; else it has two."""
TOKEN_BYTES = sum(np.dtype(kind).itemsize for kind in (*TOKEN_ARRAYS.values(), np.int32))
"""Bytes of a token in the arrays of every segment, and in the one that names the token of a row."""
MIB = 2**20


def token_bytes(described: dict[str, Any]) -> int | None:
    """Return the bytes of a token with its experts; None if the content of config.json does not tell.

    vLLM reports numbers for every layer, also for one that has no experts.

    Example:
        >>> token_bytes({"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8})
        401
    """
    part = described.get("text_config") or described
    layers, chosen = part.get("num_hidden_layers"), [part.get(key) for key in CHOSEN_KEYS]
    numbers = [value for value in chosen if type(value) is int and value > 0]
    if type(layers) is not int or not numbers:
        return None
    return TOKEN_BYTES + layers * numbers[0] * (1 if experts_of(described) <= SMALL else 2)


def too_many_experts(config: RunConfig, described: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what the broker could not deliver, and what its queue may not hold: lines with the setting to change.

    Args:
        described: content of the model's config.json; empty if it is not there yet.
    """
    each = token_bytes(described)
    if config.learner.algorithm.routes != "behaviour" or each is None:
        return [], []
    refused = _undelivered(config, each)
    return refused, [] if refused else _queued(config, each)


def _longest(config: RunConfig) -> tuple[int, str]:
    """Return the most tokens of what a batch is made of, and the setting that says so."""
    longest, window = config.learner.sampling.max_trajectory_tokens, config.actor.segment_tokens
    if config.learner.train_on == "windows" and window < longest:
        return window, "actor.segment_tokens"
    return longest, "learner.sampling.max_trajectory_tokens"


def _undelivered(config: RunConfig, each: int) -> list[str]:
    learner, (longest, setting) = config.learner, _longest(config)
    members = learner.largest_group if learner.train_on == "groups" else 1
    most, tokens = MAX_MESSAGE_BYTES - ENVELOPE_BYTES, members * longest
    if tokens * each <= most:
        return []
    what, also = ("a trajectory", "") if members == 1 else (f"a group of {members}", " or learner.group_size")
    return [
        f"with their experts (learner.algorithm.routes) tokens of this model have {each} bytes each, so {what} of "
        f"{longest} tokens ({setting}) has {tokens * each / MIB:.0f} MiB; the broker drops what has more than "
        f"{MAX_MESSAGE_BYTES / MIB:.0f}. Lower {setting} to {most // (members * each)}{also}, or set routes to "
        '"proximal"'
    ]


def _queued(config: RunConfig, each: int) -> list[str]:
    learner, (longest, setting) = config.learner, _longest(config)
    lag = learner.forced_lag if config.run.mode == "sync" else learner.max_policy_lag
    waiting, most = (lag + 1) * learner.batch_trajectories, config.broker.max_queued_bytes
    needed = waiting * longest * each
    if needed <= most:
        return []
    return [
        f"with their experts (learner.algorithm.routes) tokens of this model have {each} bytes each; "
        f"{waiting} of {longest} tokens ({setting}) may wait for the learner, which are {needed / MIB:.0f} MiB, but "
        f"broker.max_queued_bytes is {most / MIB:.0f} MiB. If actors wait for room, set it to {needed}, and see that "
        "broker.journal.max_bytes and the disk have more, or lower learner.max_policy_lag"
    ]


def try_adapters(config: RunConfig, folder: Path | None) -> list[str]:
    """Return remarks on the run's adapters: that they could not be tried, if so; the learner tries them in any case.

    Args:
        folder: folder with the model's config.json; None for a tiny model that is not made yet.

    Raises:
        ConfigError: the model cannot have these adapters, or PEFT is not installed.
    """
    lora = config.learner.lora
    # An evaluation trains nothing, and its model need not be the one of the adapters.
    if lora is None or not config.learner.steps:
        return []
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[learner.lora] needs the package peft, which is not installed: pip install '.[learner,lora]'"
        )
    if folder is None:
        return []
    try:
        found = ask("launch.preflight.model_limits", str(folder), lora.model_dump_json())
    except NoAnswer as error:
        # Some models cannot be made without weights.
        return [f"[learner.lora] could not be tried before the learner tries it: {error}"]
    if found.wrong:
        raise ConfigError(found.wrong[0])
    return []


def problem_of(folder: Path, lora: LoraConfig) -> str:
    """Return why the model of a folder cannot have these adapters, or ""."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from learner.errors import LoraError
    from learner.update.lora import chosen_layers

    # On this device a tensor has a shape and no content.
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    lm.tie_weights()
    try:
        chosen_layers(lm, lora)
    except LoraError as error:
        return str(error)
    return ""


def main() -> None:
    """Write why the model of a folder cannot have these adapters, if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight.model_limits", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "lora", type=LoraConfig.model_validate_json, help="content of [learner.lora], as JSON"
    )
    arguments = parser.parse_args()
    problem = problem_of(arguments.folder, arguments.lora)
    sys.stdout.write(json.dumps({"wrong": [problem] if problem else [], "remarks": []}) + "\n")


if __name__ == "__main__":
    main()
