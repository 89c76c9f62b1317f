"""An optimizer in the host's memory takes the steps of one beside the weights."""

import pytest
import torch

from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from tests.integration.learner.large.gradient_sums import gradient_errors
from tests.integration.learner.published import assert_equal_checkpoints, weights_of
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.trajectories import make_batch_of_groups

OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.5)


@pytest.fixture
def start(tmp_path, engines):
    model = str(save(tiny_model(tied=False, seed=4), tmp_path / "model"))

    def make(**settings):
        config = LearnerConfig(optimizer=OPTIMIZER, micro_batch_tokens=40, **settings)
        engines.append(TrainingEngine(config, model=model, total_steps=10, seed=5))
        return engines[-1]

    return make


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_updates_and_a_resume_equal_those_without_offload(start, tmp_path, stage, dtype):
    batch = make_batch_of_groups(4, 4)
    beside, away = (start(zero_stage=stage, dtype=dtype, offload=o) for o in ("none", "optimizer"))
    for _ in range(2):
        expected, found = (engine.update(batch, current_version=0).metrics for engine in (beside, away))
        for name in ("learner/loss", "learner/gradient_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, tensor in weights_of(beside).items():
        torch.testing.assert_close(weights_of(away)[name], tensor, atol=1e-6, rtol=0)

    away.save(tmp_path / "away", {})
    assert beside.load(tmp_path / "away") == {}
    beside.save(tmp_path / "beside", {})
    assert_equal_checkpoints(tmp_path / "beside", tmp_path / "away")
    away.update(batch, current_version=0)
    onward = weights_of(away)
    away.load(tmp_path / "beside")
    away.update(batch, current_version=0)
    assert all(torch.equal(tensor, onward[name]) for name, tensor in weights_of(away).items())


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_in_bfloat16_are_summed_without_loss(start, stage):
    found, rounded = gradient_errors(start(zero_stage=stage, dtype="bfloat16", offload="optimizer"))
    assert found < rounded / 1000
