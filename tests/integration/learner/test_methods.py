"""Properties that every method must have, tested in the real DeepSpeed engine."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from protocol.messages.episodes import Reward, Turn
from tests.integration.learner.published import TIMED, weights_of, without_times
from tests.integration.learner.start_ranks import run_two_ranks
from tests.integration.learner.two_ranks import method_batches, method_settings
from tests.methods import METHODS, method
from tests.trajectories import make_batch_of_groups, make_trajectory

OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.5)
STATEFUL = ["r2vpo", "entropy_target", "entropy_band", "risk", "convex", "value_head", "critic"]


@pytest.fixture
def start(model, engines):
    """Return a function that makes engines."""

    def make(**settings):
        settings = {"optimizer": OPTIMIZER, "micro_batch_tokens": 40, "max_policy_lag": 4} | settings
        engines.append(TrainingEngine(LearnerConfig(**settings), model=model, total_steps=10, seed=5))
        return engines[-1]

    return make


def assert_close(found, expected, atol=2e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def comparable(metrics):
    """Return the names of metrics that must not depend on how tokens are dealt.

    The quadrants are left out: they split at a median, where a rounding error may move a token.
    """
    free = TIMED | {"learner/padding_fraction"}
    return [name for name in metrics if name not in free and "entropy_change_" not in name]


@pytest.mark.parametrize("name", METHODS)
def test_padding_and_packing_change_nothing(start, name):
    """Two updates give equal results in small micro-batches and in one piece."""
    weights, metrics = [], []
    for budget in (20, 100_000):
        engine = start(micro_batch_tokens=budget, algorithm=method(name))
        reports = [engine.update(batch, current_version=2) for batch in method_batches()]
        assert all(report.applied for report in reports)
        weights.append(weights_of(engine))
        metrics.append(reports[-1].metrics)
    assert_close(*weights)
    for key in comparable(metrics[0]):
        assert metrics[0][key] == pytest.approx(metrics[1][key], rel=2e-3, abs=2e-4), key


def test_the_weight_of_a_group_of_one_is_that_of_its_sequence(start):
    batch = [
        make_trajectory(f"t{i}", group=f"g{i}", actions=3 + i, reward=i / 3, logp=-4.5 + 0.5 * i)
        for i in range(4)
    ]
    weights = []
    for level in ("group", "sequence", "token"):
        corrections = [{"kind": "truncated", "level": level, "ceiling": 5.0}]
        settings = {"advantage": {"kind": "batch_mean"}, "corrections": corrections}
        engine = start(algorithm=AlgorithmConfig.model_validate(settings))
        engine.update(batch, current_version=0)
        weights.append(weights_of(engine))
    assert_close(weights[0], weights[1], atol=1e-6)
    with pytest.raises(AssertionError):
        assert_close(weights[0], weights[2], atol=1e-6)


@pytest.fixture(scope="module")
def out(model, tmp_path_factory):
    """Return the folder with two ranks' results for every method; one start serves all."""
    return run_two_ranks(
        model, tmp_path_factory.mktemp("out"), (f"1-float32-{name}" for name in METHODS), timeout_s=280
    )


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_equal_one(start, out, name):
    engine = start(**method_settings(name, 1))
    for batch, found in zip(
        method_batches(), json.loads((out / f"1-float32-{name}" / "result.json").read_text()), strict=True
    ):
        expected = engine.update(batch, current_version=2).metrics
        for key in comparable(expected):
            assert found[key] == pytest.approx(expected[key], rel=2e-3, abs=2e-4), key
    assert_close(load_file(out / f"1-float32-{name}" / "trained.safetensors"), weights_of(engine))


@pytest.mark.parametrize("name", STATEFUL)
def test_resume_is_bit_equal(start, tmp_path, name):
    """The checkpoint holds what a method carries from step to step: dual variable, copies, critic."""
    first_batch, second_batch = method_batches()
    first = start(algorithm=method(name))
    first.update(first_batch, current_version=2)
    first.save(tmp_path, {})
    expected = first.update(second_batch, current_version=2).metrics
    second = start(algorithm=method(name))
    # This update makes a different past, which loading must overwrite.
    second.update(second_batch, current_version=2)
    second.load(tmp_path)
    found = second.update(second_batch, current_version=2).metrics
    assert without_times(expected) == without_times(found)
    assert_close(weights_of(second), weights_of(first), atol=0)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["value_head", "critic", "convex", "bapo"])
def test_zero_stages_agree(start, stage, name):
    one, other = start(algorithm=method(name)), start(algorithm=method(name), zero_stage=stage)
    for batch in method_batches():
        one.update(batch, current_version=2)
        assert other.update(batch, current_version=2).applied
    assert_close(weights_of(other), weights_of(one))


@pytest.mark.parametrize("name", ["value_head", "critic", "success_head"])
def test_a_critic_learns_what_returns_to_expect(start, name):
    """Returns depend on the prompt alone; the policy does not change while the critic warms up."""
    algorithm = method(name)
    algorithm = algorithm.model_copy(
        update={"critic": algorithm.critic.model_copy(update={"warmup_steps": 30, "lr": 3e-3})}
    )
    engine = start(algorithm=algorithm)
    before = weights_of(engine)
    batch = [
        dataclasses.replace(
            make_trajectory(f"t{i}", group=f"g{i}", reward=float(i % 2), version=0), token_ids=ids
        )
        for i in range(8)
        for ids in [np.array([1 + i % 2] * 4 + [5, 6, 7, 8, 9], dtype=np.int32)]
    ]
    reports = [engine.update(batch, current_version=0) for _ in range(30)]
    assert_close(weights_of(engine), before, atol=0)
    assert reports[0].metrics["critic/explained_variance"] < 0.2
    assert reports[-1].metrics["critic/explained_variance"] > 0.5
    assert engine.update(batch, current_version=0).metrics["learner/trained_tokens"] > 0
    assert not torch.equal(*(w["model.embed_tokens.weight"] for w in (weights_of(engine), before)))


def test_an_unfinished_window_trains_the_policy_and_not_the_value(start):
    window = dataclasses.replace(
        make_trajectory("t", prompt=4, actions=8, version=0), status="unfinished", window_start=8, rewards=[]
    )
    done = make_trajectory("u", group="g1", prompt=4, actions=6, reward=1.0, version=0)
    report = start(algorithm=method("value_head")).update([window, done], current_version=0)
    # One of the window's four tokens is in the ignored tail.
    assert report.metrics["learner/trained_tokens"] == 3 + 6
    assert report.metrics["critic/tokens"] == 6


def test_two_turns_have_two_returns(start):
    """Rewards 0 and 1, discount 0.9: the first turn's tokens get 0.9, the second's 1, less the group mean."""
    turns = [Turn(0, 0, 2, False), Turn(1, 2, 4, True), Turn(2, 4, 6, False), Turn(3, 6, 8, True)]
    base = make_trajectory("a", prompt=2, actions=6, observation=(4, 6), version=0)
    good = dataclasses.replace(base, turns=turns, rewards=[Reward("r", 3, 1.0)])
    bad = dataclasses.replace(base, trajectory_id="b", turns=turns, rewards=[Reward("r", 3, 0.0)])
    engine = start(algorithm=method("turn_return"))
    batch = engine._batch([good, bad], 0)
    expected = [0.45, 0.45, 0, 0, 0.5, 0.5]
    found = batch.columns["advantage"].reshape(2, 8)
    np.testing.assert_allclose(found[0, 2:], expected, atol=1e-6)
    np.testing.assert_allclose(found[1, 2:], [-x for x in expected], atol=1e-6)


def test_a_reincarnated_run_takes_itself_as_its_base(start):
    algorithm = method("convex").model_validate(METHODS["convex"] | {"reincarnation": {"step": 1}})
    engine = start(algorithm=algorithm)
    first_batch, second_batch = method_batches()
    engine.update(first_batch, current_version=2)
    trained = weights_of(engine)
    engine.update(second_batch, current_version=2)
    base = engine.updater.frozen["reference"]._module.lm
    assert_close({name: p for name, p in base.named_parameters()}, trained, atol=0)


def test_a_group_is_judged_by_its_greedy_member(start):
    greedy = make_trajectory("a", reward=0.25, temperature=0.0, version=0)
    sampled = make_trajectory("b", reward=1.0, version=0)
    algorithm = method("grpo").model_validate(METHODS["grpo"] | {"advantage": {"kind": "greedy"}})
    engine = start(algorithm=algorithm)
    report = engine.update([greedy, sampled], current_version=0)
    assert report.metrics["learner/trained_tokens"] == sampled.action_tokens
    batch = engine._batch([greedy, sampled], 0)
    assert set(batch.columns["advantage"][batch.loss_mask].tolist()) == {0.75}


def test_a_replayed_trajectory_has_a_lag_bound_of_its_own(start):
    fresh = make_batch_of_groups(1, 4, version=5)
    old = [
        dataclasses.replace(t, origin="replayed", group_id="h") for t in make_batch_of_groups(1, 4, version=1)
    ]
    engine = start(max_policy_lag=1, replay={"max_policy_lag": 4})
    report = engine.update([*fresh, *old], current_version=5)
    assert report.replayed_tokens == sum(t.action_tokens for t in old)
    assert report.metrics["learner/policy_lag_max_versions"] == 4
    strict = start(max_policy_lag=1, replay={"max_policy_lag": 3}).update([*fresh, *old], current_version=5)
    assert strict.replayed_tokens == 0


@pytest.mark.parametrize("name", ["r2vpo", "ess", "bapo", "hapo", "convex", "value_head", "vtrace"])
def test_a_step_that_is_not_finite_is_skipped_whatever_the_method(start, name):
    engine = start(algorithm=method(name))
    good, other = method_batches()
    poisoned = good[0].logp_behaviour.copy()
    poisoned[-1] = np.nan
    before, state = weights_of(engine), engine.updater.state
    report = engine.update(
        [dataclasses.replace(good[0], logp_behaviour=poisoned), *good[1:]], current_version=2
    )
    assert report.nonfinite
    assert_close(weights_of(engine), before, atol=0)
    assert engine.updater.state == state
    assert engine.update(other, current_version=2).applied


def test_values_that_are_not_finite_skip_the_update(start):
    engine = start(algorithm=method("value_head"))
    with torch.no_grad():
        engine.deepspeed.module.value_head.weight.fill_(math.nan)
    report = engine.update(method_batches()[0], current_version=2)
    assert (report.applied, report.nonfinite) == (False, True)


def test_no_optimizer_moves_without_a_gradient(start):
    """Momentum alone would move an optimizer.

    After one whole batch, a batch of windows has nothing to train the critic on, and a stale batch has
    nothing to train the policy on.
    """
    engine = start(algorithm=method("critic"), max_policy_lag=1)
    whole = make_batch_of_groups(1, 4, version=2)
    engine.update(whole, current_version=2)
    critic = [p.detach().clone() for p in engine.critic.module.parameters()]
    window = [dataclasses.replace(t, status="unfinished", rewards=[]) for t in whole]
    assert engine.update(window, current_version=2).applied
    assert all(torch.equal(a, b) for a, b in zip(critic, engine.critic.module.parameters(), strict=True))
    policy = weights_of(engine)
    report = engine.update(whole, current_version=9)
    assert not report.applied
    assert not report.nonfinite
    assert_close(weights_of(engine), policy, atol=0)
    assert not torch.equal(critic[0], next(iter(engine.critic.module.parameters())))


def test_a_policy_does_not_decay_while_its_critic_warms_up(start):
    algorithm = method("value_head")
    algorithm = algorithm.model_copy(
        update={"critic": algorithm.critic.model_copy(update={"warmup_steps": 1})}
    )
    optimizer = OPTIMIZER.model_copy(update={"weight_decay": 0.1, "warmup_steps": 2})
    engine = start(algorithm=algorithm, optimizer=optimizer)
    before = weights_of(engine)
    report = engine.update(method_batches()[0], current_version=2)
    assert not report.applied, "no new version of the same policy"
    assert_close(weights_of(engine), before, atol=0)
    report = engine.update(method_batches()[1], current_version=2)
    assert report.metrics["learner/learning_rate"] == pytest.approx(OPTIMIZER.lr / 2), (
        "its schedule begins now"
    )


def test_all_of_a_finished_trajectory_is_imitated(start):
    last = dataclasses.replace(
        make_trajectory("t", prompt=4, actions=8, reward=0.4, version=0), window_start=8, correct=True
    )
    engine = start(algorithm=method("value_head"))
    batch = engine._batch([last, make_trajectory("u", group="g1", reward=0.9, version=0)], 0)
    assert batch.columns["imitation_mask"].sum() == 8
    assert batch.loss_mask.sum() == 4 + 5


def test_what_is_reported_does_not_grow_with_the_passes(start):
    losses = []
    for passes in (1, 3):
        algorithm = method("dual_clip").model_copy(update={"passes": passes})
        engine = start(algorithm=algorithm, optimizer=OPTIMIZER.model_copy(update={"lr": 1e-12}))
        losses.append(engine.update(method_batches()[0], current_version=2).metrics["learner/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_gradient_is_compared_with_the_one_before(start):
    """The first step has none before it; the second keeps the part across the first, which has the norm |g| sin."""
    batch, _ = method_batches()
    plain, aligned = (
        start(algorithm=method("cispo").model_copy(update={"gradient_alignment": ceiling}))
        for ceiling in (None, 0.0)
    )
    first = [engine.update(batch, current_version=2).metrics for engine in (plain, aligned)]
    assert_close(weights_of(plain), weights_of(aligned), atol=0)
    assert "learner/gradient_cosine" not in first[1]
    second = [engine.update(batch, current_version=2).metrics for engine in (plain, aligned)]
    cosine = second[1]["learner/gradient_cosine"]
    assert cosine > 0.1
    across = second[0]["learner/gradient_norm"] * (1 - cosine**2) ** 0.5
    assert second[1]["learner/gradient_norm"] == pytest.approx(across, rel=1e-4)


def test_a_separate_critic_may_step_more_often_than_the_policy(start):
    batch, _ = method_batches()
    algorithm = method("critic")
    twice = algorithm.model_copy(update={"critic": algorithm.critic.model_copy(update={"steps": 2})})
    engines = [start(algorithm=each) for each in (algorithm, twice)]
    reports = [[engine.update(batch, current_version=2).metrics for _ in range(6)] for engine in engines]
    # Both policies and the first estimates are equal before a critic has learned.
    assert reports[0][0]["critic/loss"] == reports[1][0]["critic/loss"]
    assert reports[1][-1]["critic/loss"] < reports[0][-1]["critic/loss"]
