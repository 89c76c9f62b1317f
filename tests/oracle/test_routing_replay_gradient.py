"""Gradients under routing replay (R2, arXiv:2512.01374), against a slow twin that has no hooks, tables or batches.

The twin computes each trajectory alone. It writes down the experts that the first weights choose for each token, and
weighs these experts by the paper's sum, token by token: g_i = exp(z_i) / sum_{j in R} exp(z_j).
"""

import copy

import numpy as np
import pytest
import torch

from learner.update.micro_batches import make_micro_batches
from learner.update.policy import PolicyModule, micro_batch_inputs
from learner.update.routed_experts import ForcedRoutes
from tests.integration.learner.tiny_mixture import CHOSEN, LAYERS, tiny_mixture
from tests.trajectories import batch_of, make_trajectory

CPU = torch.device("cpu")
WIDTH = 64


def moved(lm):
    """Return a copy whose routers choose other experts for some tokens."""
    other = copy.deepcopy(lm)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.gate.weight.add_(0.1 * torch.randn(layer.mlp.gate.weight.shape, generator=noise))
    return other


class SlowRouter:
    """Replaces a router's forward: chooses by the largest logits and writes it down, or takes given experts."""

    def __init__(self, gate, given=None):
        self._gate, self.taken, self._given = gate, [], given

    def __call__(self, states):
        logits = states @ self._gate.weight.T
        chosen, weights = [], []
        for token, z in enumerate(logits):
            order = np.argsort(-z.detach().numpy(), kind="stable").tolist()
            experts = order[:CHOSEN] if self._given is None else self._given[token]
            summed = sum(z[j].exp() for j in experts)
            chosen.append(experts)
            weights.append(torch.stack([z[i].exp() / summed for i in experts]))
        self.taken = chosen
        return logits, torch.stack(weights), torch.tensor(chosen)


def slow_logps(lm, ids, given=None):
    """Return the log-probabilities [T - 1] of a trajectory's tokens, and the experts of each layer and token."""
    routers = [
        SlowRouter(layer.mlp.gate, None if given is None else given[i])
        for i, layer in enumerate(lm.model.layers)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for layer, router in zip(lm.model.layers, routers, strict=True):
            patch.setitem(layer.mlp.gate.__dict__, "forward", router)
        rows = lm(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
    return rows.gather(1, ids[1:, None])[:, 0], [router.taken for router in routers]


def weights_of_tokens(batch):
    """Return a weight for each token of the batch, so that no two gradients are alike."""
    return torch.linspace(0.5, 1.5, len(batch.token_ids))


def slow_gradients(first, lm, batch):
    """Return the gradients of the weighted sum over all seen tokens, with the experts that ``first`` chooses."""
    ends = np.cumsum(batch.lengths)
    weights, total = weights_of_tokens(batch), torch.zeros(())
    for end, length in zip(ends, batch.lengths, strict=True):
        own = slice(end - length, end)
        ids = torch.from_numpy(batch.token_ids[own]).long()
        with torch.no_grad():
            _, given = slow_logps(first, ids)
        logps, _ = slow_logps(lm, ids, given)
        seen = torch.from_numpy(batch.seen_mask[own][1:])
        total = total + (weights[own][1:] * logps)[seen].sum()
    total.backward()
    return {name: p.grad for name, p in lm.named_parameters()}


def gradients(first, lm, batch, *, budget, width, checkpointing=False):
    """Return the gradients of the learner's passes: recorded under the weights of ``first``, replayed under ``lm``."""
    module = PolicyModule(lm)
    module.find_shortcuts()
    after = {name: p.detach().clone() for name, p in lm.named_parameters()}
    replay = ForcedRoutes(lm)
    micro_batches = make_micro_batches(
        batch, np.arange(len(batch.lengths)), aggregation="token_mean", budget=budget, width=width
    )
    assert len(micro_batches) > 1
    assert any(part.attends is not None for part in micro_batches) == bool(width)

    def outputs(part):
        replay.force_next_pass(part, CPU)
        found = module(**micro_batch_inputs(part, CPU))
        replay.record_pass(part)
        return found.logp

    lm.load_state_dict(first.state_dict())
    replay.begin_batch(len(batch.token_ids))
    with torch.no_grad():
        for part in micro_batches:
            outputs(part)
    replay.end_recording()
    with torch.no_grad():
        for name, p in lm.named_parameters():
            p.copy_(after[name])
    if checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()
    weights = weights_of_tokens(batch)[torch.from_numpy(batch.seen_mask)]
    for part in micro_batches:
        (weights[torch.from_numpy(part.token)] * outputs(part)).sum().backward()
    replayed, changed, *_ = replay.end_batch().tolist()
    return {name: p.grad for name, p in lm.named_parameters()}, changed / replayed


@pytest.fixture(scope="module")
def batch():
    """Return two groups of four, whose members begin with six equal tokens."""
    made = []
    for g, length in enumerate((12, 17)):
        members = [
            make_trajectory(f"g{g}.{i}", group=f"g{g}", prompt=5, actions=length - 5 + i) for i in range(4)
        ]
        for member in members:
            member.token_ids[:6] = members[0].token_ids[:6]
        made += members
    return batch_of(made)


@pytest.fixture(scope="module")
def lms():
    first = tiny_mixture(seed=1)
    assert len(first.model.layers) == LAYERS
    return first, moved(first)


@pytest.fixture(scope="module")
def expected(lms, batch):
    first, later = lms
    return slow_gradients(first, copy.deepcopy(later), batch)


def largest_difference(found, expected):
    """Return the largest difference of a gradient, relative to the largest gradient of its tensor."""
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6))
        for name in expected
    )


@pytest.mark.parametrize(
    "passes",
    [
        {"budget": 400, "width": 0},
        {"budget": 40, "width": 0},
        {"budget": 60, "width": WIDTH},
        {"budget": 60, "width": WIDTH, "checkpointing": True},
    ],
    ids=["two micro-batches", "many micro-batches", "shared rows", "gradient checkpointing"],
)
def test_gradients_are_those_of_the_slow_twin(lms, batch, expected, passes):
    first, later = lms
    found, changed = gradients(first, copy.deepcopy(later), batch, **passes)
    assert 0.02 < changed < 0.5
    assert largest_difference(found, expected) < 1e-3


def test_where_routers_moved_replay_changes_the_gradient(lms, batch, expected):
    _, later = lms
    plain = slow_gradients(later, copy.deepcopy(later), batch)
    assert largest_difference(plain, expected) > 0.1


def test_where_routers_did_not_move_replay_changes_no_bit_of_it(lms, batch):
    _, later = lms
    found, changed = gradients(later, copy.deepcopy(later), batch, budget=60, width=WIDTH)
    assert changed == 0
    lm = copy.deepcopy(later)
    module = PolicyModule(lm)
    module.find_shortcuts()
    weights = weights_of_tokens(batch)[torch.from_numpy(batch.seen_mask)]
    for part in make_micro_batches(
        batch, np.arange(len(batch.lengths)), aggregation="token_mean", budget=60, width=WIDTH
    ):
        logp = module(**micro_batch_inputs(part, CPU)).logp
        (weights[torch.from_numpy(part.token)] * logp).sum().backward()
    assert all(torch.equal(found[name], p.grad) for name, p in lm.named_parameters())
