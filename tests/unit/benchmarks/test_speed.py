"""Benchmarks of speed count what they say: ratios of rounds, batches of equal work, profiles, and tables."""

import json
import time
import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest
import torch

from benchmarks.generation import program as generation
from benchmarks.generation.system import Outcome
from benchmarks.learner import (
    LONGEST,
    SHARED,
    SIZES,
    BareLoop,
    Size,
    answer_lengths,
    flame_graph,
    learner_config,
    make_model,
    make_trajectories,
    plan,
    sample,
    table,
)
from benchmarks.ratios.program import BASELINE, MOST_DROP, Pair, calls, complaints, counts, pairs, peak_bytes
from benchmarks.report import middle_and_range
from benchmarks.weights import program as weights
from learner.advantages import assign_advantages
from learner.settings.learner import LearnerConfig
from learner.update.batch import make_batch
from learner.update.engine import TrainingEngine


def test_ratios_are_of_rounds_that_ran_one_after_the_other():
    fast, slow = Outcome(100, 1.0, {"engine": 0.5}), Outcome(100, 2.0, {"engine": 0.5})
    rounds = {generation.OURS: [slow, slow, fast], generation.BAR: [fast, slow, fast]}
    found = generation.summary(rounds)[generation.OURS]
    assert found["tokens_per_second"] == [50.0, 50.0, 100.0]
    assert found["over_bare"] == [1.0, 0.5, 1.0]
    assert found["cpu_us_per_token"] == {"engine": 5_000.0}
    assert "| ours | 50 [50, 100] | 1.00 [0.50, 1.00] | engine 5000 |" in generation.table(
        generation.summary(rounds)
    )


def test_seconds_are_printed_as_milliseconds_and_ratios_as_they_are():
    row = dict.fromkeys(weights.COLUMNS, 0.5)
    found = weights.summary([row, row | {"load_s": 1.0}, row])
    assert found["load_s"] == [0.5, 0.5, 1.0]
    table = weights.table({"1M": {"bytes": 5_000_000, "ways": {"HTTP": found}}})
    assert "| 1M (5 MB), HTTP | 500 [500, 500] |" in table
    assert table.endswith("| 0.50 [0.50, 0.50] |")


TINY = Size(vocabulary=64, width=32, layers=1, heads=2, inner=64, trajectories=16)


@pytest.mark.parametrize("lengths", ["long-tailed", *SHARED])
@pytest.mark.parametrize("updates", [1, 2])
def test_both_sides_take_the_same_step(tmp_path, updates, lengths):
    """After one update the weights agree, up to the rounding of sums."""
    make_model(tmp_path, TINY)
    config = learner_config(updates)
    trajectories = make_trajectories(lengths, TINY)
    credit = assign_advantages(config.algorithm, trajectories)
    batch = make_batch(trajectories, credit, current_version=0, max_policy_lag=0)
    bare = BareLoop(tmp_path, plan(batch, config))
    engine = TrainingEngine(config, model=str(tmp_path), total_steps=1000, seed=0)
    try:
        assert engine.update(trajectories, current_version=0).applied
        bare.update()
        theirs = dict(bare._model.named_parameters())
        for name, ours in engine.weights().tensors:
            np.testing.assert_allclose(ours, theirs[name].detach(), atol=2e-5, err_msg=name)
    finally:
        engine.close()


def test_lengths_are_as_stated():
    uniform, tailed = answer_lengths("uniform", 1000), answer_lengths("long-tailed", 1000)
    assert (uniform.min(), uniform.max()) == (6, 14)
    assert tailed.min() == 8
    assert tailed.max() == LONGEST
    assert np.median(tailed) < 30


@pytest.mark.parametrize("size", SIZES)
def test_padding_of_the_long_tailed_arm_stays_below_a_twentieth(size):
    trajectories = make_trajectories("long-tailed", SIZES[size])
    config = LearnerConfig()
    credit = assign_advantages(config.algorithm, trajectories)
    batch = make_batch(trajectories, credit, current_version=0, max_policy_lag=0)
    micro_batches = [m for part in plan(batch, config) for m in part]
    computed = sum(m.token_ids.size for m in micro_batches)
    assert 1 - sum(m.filled for m in micro_batches) / computed < 0.05


def test_a_row_of_the_table_shows_median_and_spread():
    row = {
        "parameters": 1_200_000, "lengths": "uniform", "optimizer_steps": 2, "trained_tokens": 1000,
        "computed_tokens": 2000, "padded_tokens": 60, "padding_fraction": 0.03,
        "tokens_per_second": middle_and_range([1.0, 2.0, 9.0]), "bare_tokens_per_second": middle_and_range([2.0]),
        "ratio_wall": middle_and_range([0.9, 1.0]), "ratio_cpu": middle_and_range([1.0]), "ratio_best_cpu": 0.98,
    }  # fmt: skip
    assert (
        "1.2 M | uniform, 2 optimizer steps | 1,000 | 2,000 | 60 (3.0%) | 2 | 2 | 0.95 [0.90, 1.00]"
        in table([row])
    )


def test_a_flame_graph_gives_each_frame_its_share_and_leaves_out_what_all_have_in_common():
    stacks = Counter({("main", "run", "a"): 3, ("main", "run", "b", "<c>"): 1})
    root = ET.fromstring(flame_graph(stacks))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["a: 75.0%", "b: 25.0%", "<c>: 25.0%"]


def test_samples_show_the_function_that_is_busy():
    def busy():
        until = time.process_time() + 0.1
        while time.process_time() < until:
            torch.zeros(10)

    stacks = sample(busy, interval=0.001)
    inside = sum(count for stack, count in stacks.items() if any("busy" in name for name in stack))
    assert inside > 0.5 * sum(stacks.values())


def test_a_drop_beyond_a_fifth_is_a_complaint_and_a_rise_is_none():
    baseline = {"encoding, calls": 0.5}
    assert complaints({"encoding, calls": 0.41}, baseline) == []
    assert complaints({"encoding, calls": 2.0}, baseline) == []
    [complaint] = complaints({"encoding, calls": 0.39}, baseline)
    assert complaint == "encoding, calls: 0.3900, at least 0.4000 (baseline 0.5000)"


def test_times_have_a_wider_limit():
    baseline = {"batching, time": 0.1}
    assert complaints({"batching, time": 0.06}, baseline) == []
    assert len(complaints({"batching, time": 0.04}, baseline)) == 1


def test_what_is_missing_on_either_side_is_a_complaint():
    assert "renew the baseline" in complaints({"a, calls": 1.0}, {})[0]
    assert "renew the baseline" in complaints({}, {"a, calls": 1.0})[0]


def test_functions_are_counted_of_both_languages():
    def inner():
        return len([])

    def run():
        inner()
        inner()

    assert calls(run) - calls(lambda: None) == 4


def test_memory_that_is_freed_again_counts():
    assert 8e6 <= peak_bytes(lambda: np.zeros(10**6).sum()) < 8.1e6


def test_an_extra_copy_and_an_extra_operator_show():
    x = torch.ones(1000)
    found = counts(Pair(lambda: (x + 1) * 2, lambda: x + 1, torch=True))
    assert found == {"operators": 0.5, "operators' bytes": 0.5}
    array = np.ones(10**6)
    found = counts(Pair(lambda: (array.copy(), array.copy()), lambda: array.copy(), torch=False))
    assert found["peak bytes"] == pytest.approx(0.5, rel=0.01)


def test_both_ways_of_a_pair_give_the_same_where_they_can_be_compared():
    for name in ("objective", "log-probabilities"):
        ours, plain, _ = pairs()[name]
        # Our side of this pair returns the log-probability, not a loss.
        sign = -1 if name == "log-probabilities" else 1
        for got, want in zip(ours(), plain(), strict=True):
            torch.testing.assert_close(sign * got, want, atol=1e-4, rtol=1e-4)


def test_the_stored_baseline_is_of_these_pairs():
    names = json.loads(BASELINE.read_text())
    assert {name.rpartition(", ")[0] for name in names} == set(pairs())
    assert {name.rpartition(", ")[2] for name in names} <= set(MOST_DROP)
