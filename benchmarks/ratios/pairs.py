"""The pairs that `benchmarks.ratios` compares: our implementation, and a minimal one that does the same."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.learner.arms import SIZES, make_trajectories
from learner.advantages import assign_credit
from learner.settings.algorithm import AlgorithmConfig
from learner.update.batch import make_batch
from learner.update.micro_batches import make_micro_batches
from learner.update.objective import Adaptive, Tokens, make_objective
from learner.update.target_logp import target_logp
from protocol.codec import decode, encode_arrays, unpack_arrays
from protocol.messages.episodes import Reward, Segment, Turn

TOKENS = 1024
TARGETS, WIDTH, VOCABULARY = 128, 64, 4096

Functions = tuple[Callable[[], object], Callable[[], object], bool]


def pairs() -> dict[str, Functions]:
    """Return the pairs by name: (ours, plain, True if the work is counted in torch operators)."""
    return {
        **codec(),
        "batching": batching(),
        "objective": objective(),
        "log-probabilities": log_probabilities(),
    }


def codec() -> dict[str, Functions]:
    """Return two pairs: a segment with its arrays to frames, and back, against plain MessagePack."""
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": rng.integers(0, 1000, TOKENS).astype("<i4"),
        "action_mask": np.ones(TOKENS, dtype="u1"),
        "logp_behaviour": -rng.random(TOKENS).astype("<f4"),
        "policy_version": np.zeros(TOKENS, dtype="<i4"),
    }
    segment = Segment(
        trajectory_id="t.0", task_id="t", group_id="g", group_size=8, index=0, offset=0, tokens=TOKENS,
        action_tokens=TOKENS, status="finished", env="benchmark", version_min=0, version_max=0,
        turns=[Turn(0, 0, TOKENS // 2, False), Turn(1, TOKENS // 2, TOKENS, True)],
        rewards=[Reward("score", 1, 1.0)],
    )  # fmt: skip
    fields = msgspec.to_builtins(segment)
    types = {name: array.dtype for name, array in arrays.items()}

    def plain_encode() -> bytes:
        return msgspec.msgpack.encode((fields, {name: array.tobytes() for name, array in arrays.items()}))

    def plain_decode() -> object:
        header, bodies = msgspec.msgpack.decode(packed)
        return header, {name: np.frombuffer(body, types[name]) for name, body in bodies.items()}

    def our_decode() -> object:
        message, [body] = decode(frames)
        assert isinstance(message, Segment)
        return message, unpack_arrays(message.arrays, body)

    packed, frames = plain_encode(), encode_arrays(segment, arrays)
    return {
        "encoding": (lambda: encode_arrays(segment, arrays), plain_encode, False),
        "decoding": (our_decode, plain_decode, False),
    }


def batching() -> Functions:
    """Return a pair: trajectories to micro-batches, against copying the same arrays into one padded block."""
    config = AlgorithmConfig()
    trajectories = make_trajectories("long-tailed", SIZES["1M"])
    credit = assign_credit(config, trajectories)
    longest = max(map(len, trajectories))
    members = np.arange(len(trajectories))

    def ours() -> object:
        batch = make_batch(trajectories, credit, current_version=0, max_policy_lag=0)
        return make_micro_batches(batch, members, aggregation=config.aggregation, budget=8192)

    def plain() -> object:
        token_ids = np.zeros((len(trajectories), longest), dtype=np.int64)
        logp = np.zeros((len(trajectories), longest), dtype=np.float32)
        advantage = np.zeros((len(trajectories), longest), dtype=np.float32)
        mask = np.zeros((len(trajectories), longest), dtype=np.bool_)
        for i, t in enumerate(trajectories):
            np.copyto(token_ids[i, : len(t)], t.token_ids)
            np.copyto(logp[i, : len(t)], t.logp_behaviour)
            np.copyto(mask[i, : len(t)], t.action_mask)
            np.copyto(advantage[i, : len(t)], t.return_)
        return token_ids, logp, advantage, mask

    return ours, plain, False


def objective() -> Functions:
    """Return a pair: the default objective with its gradient, against the formula with weight and clip."""
    generator = torch.Generator().manual_seed(0)
    behaviour, advantage = -torch.rand(2, TOKENS, generator=generator)
    current = (behaviour + 0.1 * torch.randn(TOKENS, generator=generator)).requires_grad_()
    entropy, row = torch.ones(TOKENS), torch.zeros(TOKENS, dtype=torch.int64)
    weight = torch.full((TOKENS,), 1 / TOKENS)
    tokens = Tokens(behaviour, advantage, weight, torch.zeros(TOKENS), row, row)
    numbers, function = Adaptive(), make_objective(AlgorithmConfig())

    def ours() -> object:
        loss, _ = function(tokens, numbers, current, entropy)
        return torch.autograd.grad(loss, current)

    def plain() -> object:
        proximal = current.detach()
        ratio, correction = (current - proximal).exp(), (proximal - behaviour).exp().clamp(max=2.0)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return torch.autograd.grad(-(weight * correction * surrogate).sum(), current)

    return ours, plain, True


def log_probabilities() -> Functions:
    """Return a pair: log-probabilities and entropies with gradient, against torch's fused cross-entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TARGETS, WIDTH, generator=generator).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    target, temperature = torch.arange(TARGETS), torch.ones(TARGETS)

    def ours() -> object:
        logp, _ = target_logp(hidden, lambda h: h @ head.T, target, temperature, vocabulary=VOCABULARY)
        return torch.autograd.grad(logp.sum(), (hidden, head))

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(hidden @ head.T, target, reduction="sum"), (hidden, head))

    return ours, plain, True
