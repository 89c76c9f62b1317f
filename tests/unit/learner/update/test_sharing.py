"""Trajectories that share a row get the log-probabilities and gradients that each gets alone."""

import copy
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from learner.update.critic import CriticModule, critic_inputs
from learner.update.micro_batches import (
    MAX_POSITIONS,
    make_micro_batches,
    make_rows,
    price,
    shared_length,
    tree_attention,
    tree_row,
)
from learner.update.policy import PolicyModule, micro_batch_inputs, sharing_width
from learner.update.target_logp import logits_after_head
from tests.integration.learner.tiny_qwen3 import tiny_model
from tests.trajectories import batch_of, make_trajectory, with_routes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7)
CPU = torch.device("cpu")


def arrays(sequences):
    return [np.array(ids, dtype=np.int64) for ids in sequences]


@given(SEQUENCES)
def test_a_row_is_the_tree_of_all_beginnings_and_each_token_sees_what_it_sees_alone(sequences):
    inputs = arrays(sorted(sequences))
    row = tree_row(range(len(inputs)), inputs)
    beginnings = {tuple(ids[: i + 1]) for ids in sequences for i in range(len(ids))}
    assert row.token_ids.size == len(beginnings), "each beginning is one node"
    [attends] = tree_attention([row], row.token_ids.size + 2)
    for ids, places in zip(inputs, row.places, strict=True):
        assert row.token_ids[places].tolist() == ids.tolist()
        assert row.depth[places].tolist() == list(range(len(ids)))
        for i, place in enumerate(places):
            assert np.flatnonzero(attends[place]).tolist() == sorted(places[: i + 1])
    assert np.flatnonzero(attends[-1]).tolist() == [row.token_ids.size + 1], "padding sees itself only"
    assert row.inputs == sum(map(len, sequences))


@given(SEQUENCES, st.integers(1, 30), st.sampled_from([0, 1, 64]), st.data())
def test_every_trajectory_is_in_one_row_of_its_group_and_sharing_is_never_dearer(
    sequences, budget, width, data
):
    inputs = arrays(sequences)
    groups = np.array([data.draw(st.integers(0, 1)) for _ in inputs])
    rows = make_rows(inputs, groups, width=width, budget=budget)
    assert sorted(member for row in rows for member in row.members) == list(range(len(inputs)))
    for row in rows:
        assert len({groups[member] for member in row.members}) == 1
        assert len(row.members) == 1 or (width and row.token_ids.size <= budget)
        for member, places in zip(row.members, row.places, strict=True):
            assert row.token_ids[places].tolist() == sequences[member]
    alone = make_rows(inputs, groups, width=0, budget=budget)
    assert sum(price(row, width) for row in rows) <= sum(price(row, width) for row in alone)


@given(SEQUENCES, st.data())
def test_tokens_with_different_experts_are_different_tokens(sequences, data):
    inputs = arrays(sequences)
    experts = [
        np.array(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))) for n in map(len, inputs)
    ]
    groups = np.zeros(len(inputs), dtype=np.int64)
    rows = make_rows(inputs, groups, width=64, budget=1000, experts=experts)
    # With a tenth of the experts' number as a part of the token's id, the same tokens are shared.
    both = [ids + 10 * numbers for ids, numbers in zip(inputs, experts, strict=True)]
    expected = make_rows(both, groups, width=64, budget=1000)
    assert sorted(len(row.token_ids) for row in rows) == sorted(len(row.token_ids) for row in expected)
    for row in rows:
        held = {}
        for member, places in zip(row.members, row.places, strict=True):
            assert row.token_ids[places].tolist() == sequences[member]
            for place, number in zip(places.tolist(), experts[member].tolist(), strict=True):
                assert held.setdefault(place, number) == number


def test_rows_have_numbers_that_are_equal_where_the_rows_are():
    ts = [with_routes(make_trajectory(name), experts=300) for name in "ab"]
    ts = [replace(t, routed_experts=t.routed_experts.astype(np.int16) + 256) for t in ts]
    ts[1].routed_experts[:4] = ts[0].routed_experts[4:8]
    numbers = batch_of(ts).route_numbers
    rows = [t.routed_experts.reshape(-1, 4).tolist() for t in ts]
    known = [i for i, number in enumerate(numbers) if number]
    assert known == [*ts[0].routed_token, *(len(ts[0]) + ts[1].routed_token)]
    every = [*rows[0], *rows[1]]
    for i, one in enumerate(every):
        for j, other in enumerate(every):
            assert (numbers[known[i]] == numbers[known[j]]) == (one == other)
    assert batch_of([make_trajectory("c")]).route_numbers is None


def test_where_the_mask_costs_more_than_it_saves_nothing_is_shared():
    rng = np.random.default_rng(0)
    inputs = [np.concatenate([np.arange(4), rng.integers(0, 9, 500)]) for _ in range(8)]
    rows = make_rows(inputs, np.zeros(8, dtype=np.int64), width=64, budget=10**6)
    assert [len(row.members) for row in rows] == [1] * 8
    assert len(make_rows([np.arange(3000)] * 3, np.zeros(3, dtype=np.int64), width=64, budget=10**6)) == 1
    assert MAX_POSITIONS < 5000
    long = [np.arange(5000), np.arange(5000)]
    assert len(make_rows(long, np.zeros(2, dtype=np.int64), width=64, budget=10**6)) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_share_of_one_large_group(ranks):
    rng = np.random.default_rng(0)
    prompt = np.arange(40)
    inputs = [np.concatenate([prompt, rng.integers(0, 9, 10)]) for _ in range(32)]
    rows = make_rows(inputs, np.zeros(32, dtype=np.int64), width=512, budget=4096, ranks=ranks)
    assert len(rows) >= (1 if ranks == 1 else 2 * ranks)
    assert sum(row.token_ids.size for row in rows) < sum(map(len, inputs)) / 2


def test_shared_length():
    assert shared_length(np.array([1, 2]), np.array([1, 2])) == 2
    assert shared_length(np.array([1, 2]), np.array([2, 2])) == 0
    assert shared_length(np.zeros(0), np.array([2, 2])) == 0


def trajectories():
    """Return two groups that share a prompt, of which one shares sampled tokens, too, and a single trajectory."""
    found = [
        *(make_trajectory(f"a{i}", group="a", prompt=6, actions=3 + i % 3) for i in range(4)),
        *(make_trajectory(f"b{i}", group="b", prompt=4, actions=9, observation=(6, 8)) for i in range(3)),
        make_trajectory("c0", group="c", prompt=3, actions=4),
    ]
    for group in ("a", "b"):
        members = [t for t in found if t.group_id == group]
        for t in members:
            t.token_ids[: 6 if group == "a" else 9] = members[0].token_ids[: 6 if group == "a" else 9]
    return found


def micro_batches_of(batch, width, budget=10_000):
    members = np.arange(len(batch.lengths))
    return make_micro_batches(batch, members, aggregation="token_mean", budget=budget, width=width)


def outputs(module, batch, width, budget):
    """Return log-probabilities and entropies in the order of the batch, and the gradients of a loss."""
    module.zero_grad()
    logps = torch.zeros(int(batch.loss_mask.sum()))
    entropies, values = torch.zeros_like(logps), torch.zeros_like(logps)
    loss = torch.zeros(())
    for m in micro_batches_of(batch, width, budget):
        found = module(**micro_batch_inputs(m, CPU), entropy_gradient=True)
        weight = torch.from_numpy(np.sin(m.token + 1.0)).float()
        loss = loss + (weight * (found.logp + found.entropy + found.value)).sum()
        logps[m.token], entropies[m.token] = found.logp.detach(), found.entropy.detach()
        values[m.token] = found.value.detach()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    return (logps, entropies, values), gradients


@pytest.mark.parametrize("known_head", [True, False])
@pytest.mark.parametrize("budget", [24, 10_000])
def test_shared_rows_give_the_numbers_and_gradients_of_separate_ones(known_head, budget):
    lm = tiny_model(tied=True, seed=3)
    width = sharing_width(lm)
    assert width == lm.config.hidden_size
    module = PolicyModule(
        lm, after_head=logits_after_head(lm) if known_head else None, value_head=True, sharing=width
    )
    torch.nn.init.normal_(module.value_head.weight, std=0.1)
    batch = batch_of(trajectories())
    assert sum(m.filled for m in micro_batches_of(batch, width)) < sum(
        m.filled for m in micro_batches_of(batch, 0)
    )
    shared, separate = outputs(module, batch, width, budget), outputs(module, batch, 0, budget)
    for found, expected in zip(shared[0], separate[0], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    for name, expected in separate[1].items():
        torch.testing.assert_close(shared[1][name], expected, atol=2e-4, rtol=1e-3, msg=name)


def test_a_critic_of_its_own_gives_the_same_values_in_shared_rows():
    lm = tiny_model(tied=False, seed=4)
    critic = CriticModule(lm)
    torch.nn.init.normal_(critic.value_head.weight, std=0.1)
    batch, found = batch_of(trajectories()), []
    for width in (lm.config.hidden_size, 0):
        values = torch.zeros(int(batch.loss_mask.sum()))
        with torch.no_grad():
            for m in micro_batches_of(batch, width):
                values[m.token] = critic(**critic_inputs(m, CPU))
        found.append(values)
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)


def test_models_that_look_at_neighbours_only_share_nothing():
    lm = copy.deepcopy(tiny_model(tied=True, seed=1))
    lm.config.sliding_window = 4
    assert sharing_width(lm) == 0
    lm.config.sliding_window = None
    assert sharing_width(lm) > 0
    lm.config.attention_layers = ["global", "local"]
    assert sharing_width(lm) == 0
    lm.config.attention_layers = ["global"]
    lm.config._attn_implementation = "flash_attention_2"
    assert sharing_width(lm) == 0


def test_in_bfloat16_the_probe_tells_rounding_from_a_mask_that_is_ignored():
    lm = tiny_model(tied=True, seed=1).to(torch.bfloat16)
    assert sharing_width(lm) == lm.config.hidden_size
    decoder = lm.get_decoder()
    plain = decoder.forward
    decoder.forward = lambda attention_mask=None, **inputs: plain(**inputs)
    assert sharing_width(lm) == 0


def test_a_model_that_ignores_the_mask_shares_nothing():
    lm = copy.deepcopy(tiny_model(tied=True, seed=1))
    decoder = lm.get_decoder()
    plain = decoder.forward
    decoder.forward = lambda attention_mask=None, **inputs: plain(**inputs)
    assert sharing_width(lm) == 0
