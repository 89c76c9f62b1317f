"""Test small parts of the learner: schedule, commands, checkpoint files, report, warm start's order."""

import itertools
import json
import math
import random

import numpy as np
import pytest
import torch

from learner import checkpoint_files
from learner.errors import CheckpointError
from learner.families.branching import behind_prompt
from learner.run_files import let_all_read
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update import checkpoint
from learner.update.adaptive import AdaptiveState, learning_rate
from learner.update.ranks import (
    OptimizerStep,
    RunUpdate,
    decode_batch,
    deepspeed_config,
    encode_batch,
    initialise,
)
from learner.update.report import ROWS, UpdateOutcome, make_report
from learner.warmstart import _endless_order
from tests.trajectories import batch_of, make_batch_of_groups, make_trajectory, with_routes


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule_warms_up_and_never_leaves_its_range(schedule):
    config = OptimizerConfig(lr=2.0, warmup_steps=4, schedule=schedule)
    rates = [learning_rate(config, step, total_steps=20) for step in range(25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] == (2.0 if schedule == "constant" else pytest.approx(0.0))


def test_cosine_is_half_way_down_in_the_middle():
    assert learning_rate(OptimizerConfig(lr=1.0, schedule="cosine"), 50, 100) == pytest.approx(0.5)


def test_a_batch_survives_the_journey_to_another_rank():
    trajectories = make_batch_of_groups(2, 3)
    assert batch_of(trajectories).routes is None
    batch = batch_of([trajectories[0], *map(with_routes, trajectories[1:])], np.arange(6.0))
    copy = decode_batch(*encode_batch(RunUpdate, batch))
    first = len(trajectories[0])
    assert copy.routes.token.tolist()[:4] == [first, first + 1, first + 2, first + 3]
    for name in ("token", "experts"):
        assert getattr(batch.routes, name).dtype == getattr(copy.routes, name).dtype
        assert getattr(batch.routes, name).tolist() == getattr(copy.routes, name).tolist()
    assert batch.columns.keys() == copy.columns.keys()
    assert batch.branches is copy.branches is None
    assert batch.version == copy.version
    rest = vars(batch).keys() - {"columns", "branches", "routes", "version"}
    pairs = [(getattr(batch, name), getattr(copy, name)) for name in rest]
    for a, b in [*pairs, *((batch.columns[name], copy.columns[name]) for name in batch.columns)]:
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist()


def test_deepspeed_settings_leave_nothing_to_surprising_defaults():
    settings = deepspeed_config(LearnerConfig(optimizer=OptimizerConfig(max_grad_norm=0.3)), ranks=2)
    assert settings["gradient_clipping"] == 0.3
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["train_batch_size"] == 2
    assert "bf16" not in settings


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_sums_gradients_in_bfloat16_is_refused_with_the_cure(stage):
    config = LearnerConfig.model_construct(zero_stage=stage, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"set learner\.zero_stage to 2 or 3"):
        initialise(torch.nn.Linear(1, 1), config, ranks=1)


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 0),
        ({"processes": 2}, 1),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": "bfloat16", "processes": 2}, 2),
        ({"zero_stage": 3}, 3),
        ({"zero_stage": 0}, 0),
    ],
)
def test_one_float32_rank_shares_nothing_unless_told_to(settings, stage):
    config = LearnerConfig(**settings)
    assert config.zero_stage_used == stage
    assert deepspeed_config(config, ranks=1)["zero_optimization"] == {"stage": stage}


def a_state(**changes):
    return checkpoint.capture(
        **{
            "ranks": 1,
            "dtype": "float32",
            "updates": 3,
            "optimizer_steps": 4,
            "adaptive": AdaptiveState(dual=0.7, entropy_coefficient=0.1),
            "client": {"a": 1},
        }
        | changes
    )


def test_random_generators_continue_where_they_were(tmp_path):
    checkpoint.write_state(tmp_path, "step1", 0, a_state())
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: E731
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    state = checkpoint.read_state(tmp_path, "step1", 0, dtype="float32")
    checkpoint.restore_random(state)
    assert draw() == expected
    assert (state.updates, state.optimizer_steps, state.client) == (3, 4, {"a": 1})
    assert state.adaptive == AdaptiveState(dual=0.7, entropy_coefficient=0.1)


def test_a_rank_that_is_new_continues_from_the_state_of_rank_0(tmp_path):
    checkpoint.write_state(tmp_path, "step1", 0, a_state(ranks=2, updates=5))
    checkpoint.write_state(tmp_path, "step1", 1, a_state(ranks=2, updates=6))
    states = [checkpoint.read_state(tmp_path, "step1", rank, dtype="float32") for rank in range(3)]
    assert [state.updates for state in states] == [5, 6, 5]
    (tmp_path / "step1" / "offbeat-rank1.msgpack").unlink()
    with pytest.raises(CheckpointError, match=r"offbeat-rank1\.msgpack: .*No such file"):
        checkpoint.read_state(tmp_path, "step1", 1, dtype="float32")


def test_a_checkpoint_of_another_dtype_is_refused_with_the_cure(tmp_path):
    checkpoint.write_state(tmp_path, "step1", 0, a_state())
    with pytest.raises(CheckpointError, match=r"dtype = 'float32', this run has 'bfloat16'; resume with"):
        checkpoint.read_state(tmp_path, "step1", 0, dtype="bfloat16")


def test_a_checkpoint_says_which_adapters_it_holds_and_of_which_weights(tmp_path):
    lora = "rank 8, alpha 16, targets all-linear"
    checkpoint.write_state(tmp_path, "step1", 0, a_state(lora=lora, base="ab"))
    same = {"dtype": "float32"}
    assert checkpoint.read_state(tmp_path, "step1", 0, **same, lora=lora, base="ab").base == "ab"
    with pytest.raises(
        CheckpointError, match=r"learner\.lora: rank 8, .*; this run has: none; resume with the former"
    ):
        checkpoint.read_state(tmp_path, "step1", 0, **same)
    with pytest.raises(CheckpointError, match=r"are not those of the model folder; resume with the model"):
        checkpoint.read_state(tmp_path, "step1", 0, **same, lora=lora, base="cd")


def test_latest_points_to_whole_checkpoints_and_old_ones_go(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint_files.latest_name(tmp_path)
    names = []
    for steps in (1, 2, 2, 3):
        name = checkpoint_files.next_name(tmp_path, steps)
        (tmp_path / name).mkdir()
        checkpoint_files.mark_latest(tmp_path, name)
        names.append(name)
    assert names == ["step00000001", "step00000002", "step00000002-1", "step00000003"]
    assert checkpoint_files.latest_name(tmp_path) == names[-1]
    assert sorted(p.name for p in tmp_path.glob("step*")) == names[-2:]


def test_report_of_known_tokens():
    """Two trajectories, one half stale. Ratios by hand: current/proximal 2 and 1, proximal/behaviour 1/2."""
    trajectories = [
        make_trajectory("a", prompt=1, actions=2, version=[0, 3], logp=-1.0),
        make_trajectory("b", prompt=1, actions=1, version=2, logp=-1.0),
    ]
    batch = batch_of(trajectories, current_version=3, max_policy_lag=1)
    assert batch.trained.tolist() == [1, 1]
    rows = dict.fromkeys(ROWS, np.zeros(2, dtype=np.float32))
    rows["seen"] = np.ones(2, dtype=np.float32)
    rows["logp_behaviour"] = np.full(2, -1, dtype=np.float32)
    rows["logp_proximal"] = np.full(2, -1 - math.log(2), dtype=np.float32)
    rows["logp_current"] = np.array([-1.0, -1 - math.log(2)], dtype=np.float32)
    rows["clipped"] = np.array([1, 0], dtype=np.float32)
    rows["loss"] = np.array([0.5, 0.25], dtype=np.float32)
    outcome = UpdateOutcome(
        rows, [OptimizerStep(True, 2.0)], learning_rates=[1e-3], filled=6, computed=8, inputs=24
    )
    report = make_report(trajectories, batch, outcome, current_version=3, seconds=0.5)
    assert report.applied
    assert not report.nonfinite
    expected = {
        "learner/loss": 0.75,
        "learner/gradient_norm": 2.0,
        "learner/learning_rate": 1e-3,
        "learner/trained_tokens": 2,
        "learner/stale_token_fraction": 1 / 3,
        "learner/padding_fraction": 0.25,
        "learner/shared_fraction": 0.75,
        "learner/step_seconds": 0.5,
        "learner/policy_lag_mean_versions": 0.5,
        "learner/policy_lag_max_versions": 1,
        "learner/clip_fraction": 0.5,
        "learner/ratio_current_proximal_mean": 1.5,
        "learner/ratio_current_proximal_max": 2,
        "learner/ratio_current_proximal_min": 1,
        "learner/ratio_proximal_behaviour_mean": 0.5,
        "learner/effective_sample_size": 1,
        "learner/ratio_variance": 0.125,
        "learner/kl_current_proximal_nats": (0.5 - 1 + math.log(2)) / 2,
        "learner/kl_proximal_behaviour_nats": 0.5 - 1 + math.log(2),
    }
    for name, value in expected.items():
        assert report.metrics[name] == pytest.approx(value, abs=1e-6), name
    assert report.histograms["policy_lag_versions"].tolist() == [0, 1]
    assert report.histograms["length_trained_tokens"].tolist() == [1, 1]


def test_report_of_a_skipped_step_is_json():
    trajectories = [make_trajectory("a")]
    batch = batch_of(trajectories)
    rows = dict.fromkeys(ROWS, np.full(5, np.nan, dtype=np.float32)) | {"seen": np.ones(5, dtype=np.float32)}
    outcome = UpdateOutcome(
        rows, [OptimizerStep(False, math.inf)], learning_rates=[1e-3], filled=5, computed=5
    )
    report = make_report(trajectories, batch, outcome, current_version=0, seconds=1.0)
    assert report.nonfinite
    assert not report.applied
    assert "learner/loss" not in report.metrics
    json.dumps(report.metrics, allow_nan=False)


def test_tokens_trained_behind_another_prompt_are_not_compared_with_the_sampler():
    """Their log-probabilities are those behind the prompt that they were sampled behind, so they have to differ."""
    sampled = [make_trajectory(name, prompt=2, actions=20, version=0) for name in "ab"]
    rows = {name: np.zeros(40, dtype=np.float32) for name in ROWS} | {"seen": np.ones(40, dtype=np.float32)}
    rows["logp_current"] = np.repeat([0.0, 5.0], 20).astype(np.float32)
    rows["logp_behaviour"] = np.full(40, 1e-6, dtype=np.float32)
    outcome = UpdateOutcome(rows, [OptimizerStep(True, 1.0)], learning_rates=[1e-3], filled=44, computed=44)
    trained = [sampled[0], behind_prompt(sampled[1], np.array([7, 8, 9], dtype=np.int32))]
    report = make_report(trained, batch_of(trained), outcome, current_version=0, seconds=1.0)
    assert report.sampler.tokens == 20
    assert report.sampler.worst < 1e-5


def test_report_without_any_trained_token():
    trajectories = [make_trajectory("a", version=0)]
    batch = batch_of(trajectories, current_version=5, max_policy_lag=1)
    outcome = UpdateOutcome({row: np.zeros(0, dtype=np.float32) for row in ROWS})
    report = make_report(trajectories, batch, outcome, current_version=5, seconds=1.0)
    assert (report.applied, report.nonfinite) == (False, False)
    assert report.metrics["learner/stale_token_fraction"] == 1
    assert report.metrics["learner/trained_tokens"] == 0


def test_warm_start_sees_all_examples_before_any_twice():
    order = _endless_order(10, 25, seed=0)
    assert len(order) == 25
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))


def test_an_exported_model_can_be_read_by_whom_the_umask_allows(tmp_path):
    for name, mode in (("config.json", 0o644), ("model.safetensors", 0o600)):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(mode)
    let_all_read(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
