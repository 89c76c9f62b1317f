"""Both sides of the learner's benchmark do equal work, and the profile shows where time goes."""

import time
import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest
import torch

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
    spread,
    table,
)
from learner.advantages import assign_credit
from learner.settings.learner import LearnerConfig
from learner.update.batch import make_batch
from learner.update.engine import TrainingEngine

TINY = Size(vocabulary=64, width=32, layers=1, heads=2, inner=64, trajectories=16)


@pytest.mark.parametrize("lengths", ["long-tailed", *SHARED])
@pytest.mark.parametrize("updates", [1, 2])
def test_both_sides_take_the_same_step(tmp_path, updates, lengths):
    """After one update the weights agree, up to the rounding of sums."""
    make_model(tmp_path, TINY)
    config = learner_config(updates)
    trajectories = make_trajectories(lengths, TINY)
    credit = assign_credit(config.algorithm, trajectories)
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
    credit = assign_credit(config.algorithm, trajectories)
    batch = make_batch(trajectories, credit, current_version=0, max_policy_lag=0)
    micro_batches = [m for part in plan(batch, config) for m in part]
    computed = sum(m.token_ids.size for m in micro_batches)
    assert 1 - sum(m.filled for m in micro_batches) / computed < 0.05


def test_a_row_of_the_table_shows_median_and_spread():
    row = {
        "parameters": 1_200_000, "lengths": "uniform", "optimizer_steps": 2, "trained_tokens": 1000,
        "computed_tokens": 2000, "padded_tokens": 60, "padding_fraction": 0.03,
        "tokens_per_second": spread([1.0, 2.0, 9.0]), "bare_tokens_per_second": spread([2.0]),
        "ratio_wall": spread([0.9, 1.0]), "ratio_cpu": spread([1.0]), "ratio_best_cpu": 0.98,
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
