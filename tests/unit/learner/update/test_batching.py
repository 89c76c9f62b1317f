"""Micro-batches hold every token that carries gradient exactly once, whatever the budget and the ranks."""

import itertools

import numpy as np
import pytest

from learner.errors import StaleTokens
from learner.update.micro_batches import (
    MOST_PADDING,
    ON_CPU,
    ON_GPU,
    CutRule,
    cheapest_cuts,
    choose_cuts,
    deal_mini_batches,
    make_micro_batches,
)
from tests.trajectories import batch_of, make_batch_of_groups, make_trajectory


def plan(batch, *, budget=64, ranks=1, aggregation="token_mean", members=None, rule=ON_CPU):
    members = np.arange(len(batch.lengths)) if members is None else members
    return [
        make_micro_batches(
            batch, members, aggregation=aggregation, budget=budget, rule=rule, rank=rank, ranks=ranks
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [16, 40, 10_000])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_every_target_appears_once_with_its_own_numbers(ranks, budget, aggregation):
    trajectories = make_batch_of_groups(3, 4)
    batch = batch_of(trajectories, np.arange(1, len(trajectories) + 1))
    plans = plan(batch, budget=budget, ranks=ranks, aggregation=aggregation)
    assert len({len(p) for p in plans}) == 1
    micro_batches = [m for p in plans for m in p if m.token[0] >= 0]
    tokens = np.concatenate([m.token for m in micro_batches])
    order = np.argsort(tokens)
    assert tokens[order].tolist() == list(range(int(batch.loss_mask.sum())))
    found = np.concatenate([m.target for m in micro_batches])[order]
    assert found.tolist() == batch.token_ids[batch.loss_mask].tolist()
    for name, column in batch.columns.items():
        found = np.concatenate([m.columns[name] for m in micro_batches])[order]
        assert found.tolist() == column[batch.loss_mask].tolist()
    assert sum(m.columns["weight"].sum() for m in micro_batches) == pytest.approx(1)


@pytest.mark.parametrize("width", [0, 64])
def test_every_input_token_is_found_at_its_place_also_where_members_share_it(width):
    beginning = make_trajectory("a", prompt=6, actions=5)
    other = make_trajectory("b", prompt=6, actions=3)
    other.token_ids[:6] = beginning.token_ids[:6]
    batch = batch_of([beginning, other, make_trajectory("c", group="g1", prompt=2, actions=3)])
    micro_batches = make_micro_batches(
        batch, np.arange(3), aggregation="token_mean", budget=64, rule=ON_GPU, width=width
    )
    for m in micro_batches:
        assert m.token_ids.ravel()[m.input_place].tolist() == batch.token_ids[m.input_token].tolist()
    tokens = np.concatenate([m.input_token for m in micro_batches]).tolist()
    assert sorted(tokens) == [*range(10), *range(11, 19), *range(20, 24)]
    shared = sum(m.inputs - m.filled for m in micro_batches)
    assert shared == (6 if width else 0)


def test_inputs_end_where_the_last_target_is_predicted():
    """The prompt is 0..3, the actions are 4 and 5, the observation is 6..8: token 4 is the last input."""
    batch = batch_of([make_trajectory("a", prompt=4, actions=5, observation=(6, 9))])
    [[m]] = plan(batch)
    assert m.token_ids.tolist() == [batch.token_ids[:5].tolist()]
    assert m.position.tolist() == [3, 4]
    assert m.target.tolist() == batch.token_ids[4:6].tolist()


def test_positions_point_into_the_padded_rows():
    batch = batch_of([make_trajectory("a", prompt=2, actions=3), make_trajectory("b", prompt=5, actions=6)])
    [[m]] = plan(batch, rule=ON_GPU)
    assert m.token_ids.shape == (2, 10)
    rows, columns = np.divmod(m.position, 10)
    assert rows.tolist() == [0] * 6 + [1] * 3
    assert columns.tolist() == [4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert m.filled == 14


def test_stale_trajectories_are_left_out_and_denominators_do_not_count_them():
    stale = make_trajectory("old", version=0)
    fresh = make_trajectory("new", version=5)
    batch = batch_of([stale, fresh], current_version=5, max_policy_lag=2)
    [[m]] = plan(batch, aggregation="sequence_mean")
    assert len(m.token_ids) == 1
    assert m.columns["weight"].tolist() == pytest.approx([0.2] * 5)


def test_half_stale_trajectory_keeps_its_fresh_suffix():
    batch = batch_of([make_trajectory("a", version=[0, 0, 3, 3, 4])], current_version=4, max_policy_lag=1)
    assert batch.loss_mask.tolist() == [False] * 6 + [True] * 3
    [[m]] = plan(batch)
    assert m.target.tolist() == batch.token_ids[6:].tolist()


def test_nothing_to_train_gives_no_micro_batches_on_any_rank():
    batch = batch_of([make_trajectory("a")], current_version=9, max_policy_lag=1)
    assert plan(batch, ranks=2) == [[], []]


def test_a_rank_without_rows_runs_a_dummy_of_weight_zero():
    first, second = plan(batch_of([make_trajectory("a")]), ranks=2)
    assert len(first) == len(second) == 1
    assert second[0].columns["weight"].tolist() == [0]
    assert second[0].token.tolist() == [-1]


def test_ranks_get_nearly_the_same_work():
    rng = np.random.default_rng(0)
    batch = batch_of([make_trajectory(f"t{i}", actions=int(rng.integers(1, 200))) for i in range(64)])
    filled = [sum(m.filled for m in p) for p in plan(batch, budget=2048, ranks=4)]
    assert max(filled) / min(filled) < 1.02


def test_long_tailed_lengths_waste_little():
    rng = np.random.default_rng(1)
    lengths = [int(min(400, 8 + rng.pareto(1.1) * 10)) for _ in range(128)]
    batch = batch_of([make_trajectory(f"t{i}", actions=n) for i, n in enumerate(lengths)])
    [micro_batches] = plan(batch, budget=8192)
    computed = sum(m.token_ids.size for m in micro_batches)
    filled = sum(m.filled for m in micro_batches)
    assert filled / computed > 0.95
    assert len(micro_batches) < 20


def test_where_a_micro_batch_is_dear_padding_is_borne():
    lengths = long_tailed()
    assert len(choose_cuts(lengths, 8192, ON_GPU)) < len(choose_cuts(lengths, 8192, ON_CPU))


def test_the_price_falls_only_while_there_is_much_padding_and_only_so_far():
    lengths = long_tailed()
    assert padded(choose_cuts(lengths, 8192, CutRule(64, 64)), lengths) > MOST_PADDING
    assert padded(choose_cuts(lengths, 8192, CutRule(10_000, 1)), lengths) <= MOST_PADDING
    least = choose_cuts(lengths, 8192, CutRule(10_000, 500))
    assert least == cheapest_cuts(lengths, 8192, 625)
    even = np.full(64, 30)
    assert choose_cuts(even, 8192, CutRule(64, 1)) == [(0, 64)]


def long_tailed():
    rng = np.random.default_rng(1)
    return np.sort([int(min(400, 8 + rng.pareto(1.1) * 10)) for _ in range(128)])[::-1]


def padded(cuts, lengths):
    return 1 - lengths.sum() / sum(lengths[start] * (end - start) for start, end in cuts)


def test_cuts_are_the_cheapest_of_all():
    """The cuts cost as little as the best of all 2^8 ways to cut nine rows."""
    rng = np.random.default_rng(2)
    budget = 120
    for _ in range(20):
        lengths = np.sort(rng.integers(1, 60, 9))[::-1]
        cost = int(rng.integers(0, 80))
        ways = [cut_at(bits, 9) for bits in range(2**8)]
        prices = [price(runs, lengths, cost) for runs in ways if fits(runs, lengths, budget)]
        assert price(cheapest_cuts(lengths, budget, cost), lengths, cost) == min(prices)


def cut_at(bits, rows):
    edges = [0, *(i + 1 for i in range(rows - 1) if bits >> i & 1), rows]
    return list(itertools.pairwise(edges))


def price(runs, lengths, cost):
    return sum((end - start) * lengths[start] + cost for start, end in runs)


def fits(runs, lengths, budget):
    return all((end - start) * lengths[start] <= budget or end - start == 1 for start, end in runs)


def test_mini_batches_deal_all_trajectories_once_and_repeatably():
    parts = deal_mini_batches(10, 3, seed=[1, 2])
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert [len(p) for p in parts] == [4, 3, 3]
    assert all((a == b).all() for a, b in zip(parts, deal_mini_batches(10, 3, seed=[1, 2]), strict=True))
    assert len(deal_mini_batches(2, 5, seed=[0])) == 2


def test_a_token_from_the_future_is_refused():
    with pytest.raises(StaleTokens, match="version 7, the learner is at 5"):
        batch_of([make_trajectory("a", version=7)], current_version=5)


def test_greedy_trajectories_carry_no_gradient():
    """Greedy trajectories have no behaviour distribution to train against; others are compared with them."""
    batch = batch_of([make_trajectory("a", temperature=0.0), make_trajectory("b")])
    assert batch.trained.tolist() == [0, 5]
