"""Holds the experts that travel with each token against what the broker keeps and delivers. Pure.

Without its experts a token has 13 bytes, and with them some hundred, so limits are met that are far away otherwise.
"""

from typing import Any

import numpy as np

from broker.core.records import ENVELOPE_BYTES
from launch.preflight.model_limits import experts_of
from launch.run_file.sections import RunConfig
from protocol.arrays import TOKEN_ARRAYS
from protocol.codec import MAX_MESSAGE_BYTES

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
