"""Test the real DeepSpeed engine in one process, at every ZeRO stage, against plain PyTorch."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.algorithms.advantages import compare
from learner.errors import CheckpointError
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.settings.surrogates import ClipSurrogate
from learner.update.adaptive import score_mini_batches
from learner.update.engine import TrainingEngine
from tests.integration.learner.published import (
    assert_equal_checkpoints,
    assert_weights_close,
    resumed,
    weights_of,
)
from tests.integration.learner.tiny_qwen3 import VOCAB
from tests.methods import method
from tests.trajectories import make_batch_of_groups, make_trajectory

STAGES = [0, 1, 2, 3]
# eps is far above a gradient's rounding error. With 1e-8, Adam would turn a rounding error into a step of lr.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.5, weight_decay=0.01)

CLIPPED = AlgorithmConfig(surrogate=ClipSurrogate())


@pytest.fixture
def start(model, engines):
    """Return a function that makes engines."""

    def make(**settings):
        settings = {
            "optimizer": OPTIMIZER,
            "micro_batch_tokens": 40,
            "max_policy_lag": 4,
            "algorithm": CLIPPED,
        } | settings
        engines.append(TrainingEngine(LearnerConfig(**settings), model=model, total_steps=10, seed=5))
        return engines[-1]

    return make


def digest(engine):
    sha = hashlib.sha256()
    for name, tensor in weights_of(engine).items():
        sha.update(name.encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class PlainTorch:
    """Reference for the engine: one trajectory at a time, full logits, no DeepSpeed."""

    def __init__(self, model):
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.01
        )

    def step(self, trajectories, ceiling=2.0, low=0.2, high=0.28):
        returns = np.array([t.return_ for t in trajectories])
        advantages = compare(returns, [t.group_id for t in trajectories], scale="std")
        total = sum(t.action_tokens for t in trajectories)
        self.optimizer.zero_grad()
        loss_sum = 0.0
        for t, advantage in zip(trajectories, advantages, strict=True):
            ids = torch.from_numpy(t.token_ids).long()[None]
            rows = self.lm(input_ids=ids).logits[0, :-1].log_softmax(-1)
            logp = rows.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(t.action_mask[1:])]
            behaviour = torch.from_numpy(t.logp_behaviour[t.action_mask])
            weight = (logp.detach() - behaviour).exp().clamp(max=ceiling)
            ratio = (logp - logp.detach()).exp()
            value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            loss = -(weight * value).sum() / total
            loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.lm.parameters(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        return loss_sum, float(norm)


@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_equal_plain_torch(start, model, stage):
    """Several micro-batches of unequal length; gradients are clipped (norm above 0.5)."""
    engine, plain = start(zero_stage=stage), PlainTorch(model)
    trajectories = make_batch_of_groups(4, 4)
    for _ in range(2):
        report = engine.update(trajectories, current_version=0)
        loss, norm = plain.step(trajectories)
        assert report.applied
        assert report.metrics["learner/loss"] == pytest.approx(loss, abs=1e-5)
        assert report.metrics["learner/gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > OPTIMIZER.max_grad_norm
    expected = {name: p.detach() for name, p in plain.lm.named_parameters()}
    assert_weights_close(weights_of(engine), expected, atol=1e-5)


def test_cutting_into_micro_batches_changes_nothing(start):
    trajectories = make_batch_of_groups(4, 4)
    reports, weights = [], []
    for budget in (16, 60, 100_000):
        engine = start(micro_batch_tokens=budget)
        reports.append(engine.update(trajectories, current_version=0).metrics)
        weights.append(weights_of(engine))
    for metrics, found in zip(reports[1:], weights[1:], strict=True):
        assert metrics["learner/loss"] == pytest.approx(reports[0]["learner/loss"], abs=1e-6)
        assert metrics["learner/gradient_norm"] == pytest.approx(
            reports[0]["learner/gradient_norm"], rel=1e-5
        )
        assert_weights_close(found, weights[0], atol=2e-5)


def test_gradient_checkpointing_changes_nothing(start):
    trajectories = make_batch_of_groups()
    plain, checkpointed = start(), start(gradient_checkpointing=True)
    plain.update(trajectories, current_version=0)
    checkpointed.update(trajectories, current_version=0)
    assert_weights_close(weights_of(checkpointed), weights_of(plain), atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_logits_in_chunks_change_nothing(start, monkeypatch, stage):
    """At stage 3 the backward pass gathers the sharded head again for every chunk."""
    trajectories = make_batch_of_groups()
    algorithm = AlgorithmConfig(entropy={"coefficient": 0.01})
    whole, chunked = (
        start(zero_stage=stage, algorithm=algorithm),
        start(zero_stage=stage, algorithm=algorithm),
    )
    whole.update(trajectories, current_version=0)
    monkeypatch.setattr("learner.update.target_logp.CHUNK_ELEMENTS", 4 * VOCAB)
    chunked.update(trajectories, current_version=0)
    assert_weights_close(weights_of(chunked), weights_of(whole), atol=1e-6)


def test_one_update_needs_no_extra_forward_for_the_proximal_policy(start, monkeypatch):
    """Scoring in an extra pass and scoring in the update's own pass give exactly equal weights."""
    trajectories = make_batch_of_groups()
    shortcut, scored = start(), start()
    assert shortcut.update(trajectories, current_version=0).applied

    assert all(s.logp_proximal is None for s in scores_of(shortcut, trajectories))
    monkeypatch.setattr("learner.update.adaptive.needs_scores", lambda *_: True)
    assert all(s.logp_proximal is not None for s in scores_of(scored, trajectories))
    assert scored.update(trajectories, current_version=0).applied
    assert digest(shortcut) == digest(scored)


def scores_of(engine, trajectories):
    batch, updater = engine._batch(trajectories, 0), engine.updater
    mini_batches = [m.micro_batches for m in updater._mini_batches(batch, engine.config.algorithm)]
    parts = score_mini_batches(
        updater.forward,
        updater.frozen,
        batch,
        mini_batches,
        engine.config.algorithm,
        first_pass=len(mini_batches),
        ranks=updater.ranks,
        device=updater.device,
    )
    return [scores for part in parts for scores in part]


def test_several_updates_per_batch_leave_the_proximal_policy_behind(start):
    algorithm = AlgorithmConfig(updates_per_batch=3, surrogate=ClipSurrogate(low=0.001, high=0.001))
    engine = start(algorithm=algorithm, optimizer=OptimizerConfig(lr=3e-3))
    report = engine.update(make_batch_of_groups(3, 4), current_version=0)
    assert engine.optimizer_steps == 3
    assert report.metrics["learner/trained_tokens"] == sum(
        t.action_tokens for t in make_batch_of_groups(3, 4)
    )
    ratios = report.histograms["ratio_current_proximal"]
    # The first mini-batch is on policy, the others are not.
    assert 0.1 < (np.abs(ratios - 1) > 1e-3).mean() < 0.9
    assert report.metrics["learner/clip_fraction"] > 0
    assert report.metrics["learner/kl_current_proximal_nats"] > 0


def test_behaviour_as_proximal_policy(start):
    report = start(algorithm=AlgorithmConfig(proximal="behaviour")).update(
        make_batch_of_groups(), current_version=0
    )
    assert (report.histograms["ratio_proximal_behaviour"] == 1).all()
    assert report.metrics["learner/ratio_current_proximal_max"] > 1.5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["logp_behaviour", "advantage"])
def test_nan_skips_the_step_and_the_next_one_is_sound(start, model, monkeypatch, stage, where):
    engine, plain = start(zero_stage=stage), PlainTorch(model)
    good = make_batch_of_groups(4, 4)
    bad = list(good)
    before = digest(engine)
    with monkeypatch.context() as patch:
        if where == "logp_behaviour":
            poisoned = bad[5].logp_behaviour.copy()
            poisoned[-1] = np.nan
            bad[5] = dataclasses.replace(bad[5], logp_behaviour=poisoned)
        else:
            advantages = np.where(np.arange(len(bad)) == 5, np.nan, 1.0)
            patch.setattr("learner.advantages.trajectory_advantages", lambda *_: (advantages, advantages))
        report = engine.update(bad, current_version=0)
    assert (report.applied, report.nonfinite) == (False, True)
    assert engine.optimizer_steps == 0
    assert digest(engine) == before
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert engine.update(good, current_version=0).applied
    plain.step(good)
    expected = {name: p.detach() for name, p in plain.lm.named_parameters()}
    assert_weights_close(weights_of(engine), expected, atol=1e-5)


def test_nan_on_a_masked_token_does_not_matter(start):
    """A masked token never enters the gradient; a weight of 0 would not suffice, because 0 · NaN is NaN."""
    group = make_batch_of_groups(1, 4)
    poisoned = np.where(group[0].action_mask, group[0].logp_behaviour, np.nan).astype(np.float32)
    a, b = start(), start()
    assert a.update(
        [dataclasses.replace(group[0], logp_behaviour=poisoned), *group[1:]], current_version=0
    ).applied
    b.update(group, current_version=0)
    assert digest(a) == digest(b)


def test_half_stale_trajectory_trains_only_its_fresh_suffix(start, model):
    """The result equals a run whose stale tokens are observations; the group's advantages do not change."""
    group = make_batch_of_groups(1, 4)
    total = len(group[0])
    versions = np.where(group[0].action_mask, 9, -1).astype(np.int32)
    first_action = group[0].prompt_tokens
    versions[first_action : first_action + 2] = 3
    fresh = [
        dataclasses.replace(t, policy_version=np.where(t.action_mask, 9, -1).astype(np.int32)) for t in group
    ]
    half_stale = [dataclasses.replace(fresh[0], policy_version=versions), *fresh[1:]]
    mask = group[0].action_mask & (np.arange(total) >= first_action + 2)
    as_observations = [dataclasses.replace(fresh[0], action_mask=mask), *fresh[1:]]
    a, b = start(max_policy_lag=5), start(max_policy_lag=5)
    report = a.update(half_stale, current_version=9)
    expected = b.update(as_observations, current_version=9)
    assert digest(a) == digest(b)
    assert report.metrics["learner/trained_tokens"] == expected.metrics["learner/trained_tokens"]
    assert report.metrics["learner/policy_lag_max_versions"] == 0
    action_tokens = sum(t.action_tokens for t in group)
    assert report.metrics["learner/stale_token_fraction"] == pytest.approx(2 / action_tokens)


def test_batch_that_is_all_stale_changes_nothing_and_says_so(start):
    engine = start(max_policy_lag=1)
    before = digest(engine)
    report = engine.update(make_batch_of_groups(), current_version=9)
    assert (report.applied, report.nonfinite) == (False, False)
    assert report.metrics["learner/trained_tokens"] == 0
    assert digest(engine) == before


def test_temperature_is_that_of_sampling(start, model):
    """Behaviour log-probabilities computed at temperature 0.5 give ratios of one."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    t = make_trajectory("t", temperature=0.5, actions=8)
    ids = torch.from_numpy(t.token_ids).long()[None]
    with torch.no_grad():
        rows = (lm(input_ids=ids).logits[0, :-1] / 0.5).log_softmax(-1)
    logp = np.zeros(len(t), dtype=np.float32)
    logp[1:] = rows.gather(1, ids[0, 1:, None])[:, 0].numpy()
    t = dataclasses.replace(t, logp_behaviour=np.where(t.action_mask, logp, 0).astype(np.float32))
    report = start().update([t], current_version=0)
    np.testing.assert_allclose(report.histograms["ratio_proximal_behaviour"], 1, atol=1e-4)


def test_a_lane_is_trained_at_temperature_one_whatever_it_was_sampled_at(start, model):
    """Its update is that of an on-policy answer at temperature 1 with the same advantage, beside the same group."""
    group = make_batch_of_groups(1, 4)
    t = make_trajectory("t", group="g0", temperature=1.3, logp=-7.0, lane=True, advantage=1.0)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(t.token_ids).long()[None]
    with torch.no_grad():
        rows = lm(input_ids=ids).logits[0, :-1].log_softmax(-1)
    logp = np.zeros(len(t), dtype=np.float32)
    logp[1:] = rows.gather(1, ids[0, 1:, None])[:, 0].numpy()
    known = dataclasses.replace(
        t, group_id="alone", lane=False, temperature=1.0, logp_behaviour=np.where(t.action_mask, logp, 0)
    )
    a, b = start(), start()
    report, expected = (e.update([*group, each], current_version=0) for e, each in ((a, t), (b, known)))
    assert_weights_close(weights_of(a), weights_of(b), atol=1e-5)
    assert report.metrics["learner/lane_share"] == pytest.approx(
        t.action_tokens / expected.metrics["learner/trained_tokens"]
    )
    assert report.metrics["learner/lane_temperature"] == pytest.approx(1.3)
    assert "learner/lane_share" not in expected.metrics
    assert report.sampler.tokens == sum(each.action_tokens for each in group)


def test_rewarded_actions_become_likelier(start):
    trajectories = make_batch_of_groups(1, 4)
    engine = start(algorithm=AlgorithmConfig(corrections=()))
    before = score(weights_of(engine), trajectories, engine.model)
    for _ in range(3):
        assert engine.update(trajectories, current_version=0).applied
    gain = score(weights_of(engine), trajectories, engine.model) - before
    returns = [t.return_ for t in trajectories]
    assert gain[np.argmax(returns)] > 0 > gain[np.argmin(returns)]


@torch.no_grad()
def score(weights, trajectories, model):
    """Return the mean log-probability of each trajectory's actions."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.load_state_dict(weights, strict=False)
    result = []
    for t in trajectories:
        ids = torch.from_numpy(t.token_ids).long()[None]
        rows = lm(input_ids=ids).logits[0, :-1].log_softmax(-1)
        result.append(
            rows.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(t.action_mask[1:])].mean().item()
        )
    return np.array(result)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")]
)
def test_resume_is_bit_equal(start, tmp_path, stage, dtype):
    first, second = resumed(
        start,
        tmp_path,
        {"step": 1, "nested": {"cursor": [1, 2.5, "x", None]}},
        lr=1e-3,
        zero_stage=stage,
        dtype=dtype,
    )
    assert digest(first) == digest(second)


@pytest.mark.parametrize("stage", STAGES)
def test_another_stage_resumes_with_equal_weights_and_optimizer(start, tmp_path, stage):
    first, other = start(zero_stage=stage), start(zero_stage=(stage + 1) % 4)
    first.update(make_batch_of_groups(), current_version=0)
    first.save(tmp_path / "first", {"cursor": 3})
    assert other.load(tmp_path / "first") == {"cursor": 3}
    other.save(tmp_path / "other", {})
    assert_equal_checkpoints(tmp_path / "other", tmp_path / "first")
    assert digest(other) == digest(first)
    for engine in (first, other):
        engine.update(make_batch_of_groups(4, 4), current_version=0)
    assert_weights_close(weights_of(other), weights_of(first), atol=1e-6)


def test_a_checkpoint_of_another_model_is_refused(start, tmp_path):
    start().save(tmp_path, {})
    with pytest.raises(
        CheckpointError, match=r"has no numbers of value_head\.bias, .* resume with the model"
    ):
        start(algorithm=method("value_head")).load(tmp_path)


def test_a_checkpoint_without_the_file_of_a_rank_is_refused(start, tmp_path):
    engine = start()
    engine.save(tmp_path, {})
    for path in tmp_path.glob("step*/policy-rank0.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no file policy-rank0\.safetensors"):
        engine.load(tmp_path)


def test_weights_are_those_of_the_model_folder_at_every_stage(start, model):
    from safetensors.torch import load_file

    expected = load_file(f"{model}/model.safetensors")
    for stage in STAGES:
        engine = start(zero_stage=stage)
        shapes = engine.weights().shapes
        assert "lm_head.weight" not in shapes  # tied
        assert_weights_close(weights_of(engine), expected, atol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_trains_close_to_float32(start, stage):
    trajectories = make_batch_of_groups()
    half, single = start(zero_stage=stage, dtype="bfloat16"), start(zero_stage=stage)
    report = half.update(trajectories, current_version=0)
    expected = single.update(trajectories, current_version=0)
    assert report.applied
    for name in ("learner/loss", "learner/gradient_norm", "learner/entropy_nats"):
        assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=0.05, abs=0.02), name
    shapes = half.weights().shapes
    assert {dtype for dtype, _ in shapes.values()} == {"BF16"}


@pytest.mark.parametrize("stage", [1, 3])
def test_final_model_is_a_hugging_face_folder(start, model, tmp_path, stage):
    engine = start(zero_stage=stage)
    engine.update(make_batch_of_groups(), current_version=0)
    engine.save_pretrained(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    expected = weights_of(engine)
    assert_weights_close(dict(loaded.named_parameters()), expected, atol=0)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_an_empty_batch_is_refused(start):
    with pytest.raises(ValueError, match="at least one trajectory"):
        start().update([], current_version=0)


def test_two_processes_without_torchrun_are_refused_with_the_cure(start):
    with pytest.raises(RuntimeError, match="but 1 were started; make them equal"):
        start(processes=2)
