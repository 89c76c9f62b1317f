"""How far the gradients that an engine sums over micro-batches are from their exact sums."""

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from learner.update.deepspeed_zero import accumulation, finish_step
from learner.update.policy import load_policy
from tests.integration.learner.tiny_qwen3 import VOCAB

MICRO_BATCHES = 64
"""Micro-batches of all ranks."""
TOKENS = 12


def inputs(index):
    """Return the arguments of the policy for one micro-batch of random tokens."""
    ids = torch.from_numpy(np.random.default_rng(index).integers(3, VOCAB, (2, TOKENS)))
    position = torch.arange(2 * TOKENS).view(2, TOKENS)[:, :-1].reshape(-1)
    return ids, position, ids[:, 1:].reshape(-1), torch.ones(len(position))


def loss_of(outputs):
    return -outputs.logp.mean() / MICRO_BATCHES


def gradient_errors(engine, ranks):
    """Return the errors of an engine's gradients and of their sums in bfloat16, relative to the exact sums.

    The exact sums are those of the bfloat16 gradients of each micro-batch, in float64. With several ranks, every rank
    calls this.
    """
    exact, rounded = exact_sums(engine.model)
    zero = engine._own.deepspeed
    mine = range(dist.get_rank(), MICRO_BATCHES, ranks)
    with accumulation(zero, ranks) as backward:
        for index in mine:
            backward(loss_of(zero(*inputs(index))), index == mine[-1])
    found = {name: safe_get_full_grad(p) for name, p in zero.module.named_parameters()}
    finish_step(zero, lr=0.0)
    return [relative_error(sums, exact) for sums in (found, rounded)]


def exact_sums(model):
    """Return the sums of all gradients in float64, and in bfloat16."""
    module = load_policy(model, dtype=torch.bfloat16)
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
    rounded = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for index in range(MICRO_BATCHES):
        module.zero_grad()
        loss_of(module(*inputs(index))).backward()
        for name, p in module.named_parameters():
            exact[name] += p.grad
            rounded[name] += p.grad
    return exact, rounded


def relative_error(found, exact):
    """Return the norm of the difference over the norm of the exact gradients."""
    difference = sum(float((found[name].double() - tensor).square().sum()) for name, tensor in exact.items())
    return (difference / sum(float(tensor.square().sum()) for tensor in exact.values())) ** 0.5
