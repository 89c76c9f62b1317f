"""Large models: gradients summed in float32, loading in parts, buffers as counted, an optimizer in host memory."""

import pytest
import torch

from launch.preflight.memory import ModelSize, bucket_bytes
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update import ranks as zero
from learner.update.engine import TrainingEngine
from tests.integration.learner.large.gradient_sums import gradient_errors
from tests.integration.learner.large.loading import loaded
from tests.integration.learner.published import assert_equal_checkpoints, weights_of
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.trajectories import make_batch_of_groups


@pytest.mark.parametrize("stage", [2, 3])
def test_64_micro_batches_in_bfloat16_are_summed_without_loss(tmp_path, stage):
    model = str(save(tiny_model(tied=False, seed=4), tmp_path))
    config = LearnerConfig(zero_stage=stage, dtype="bfloat16")
    engine = TrainingEngine(config, model=model, total_steps=1, seed=5)
    # The second time, nothing must be left of the first.
    errors = [gradient_errors(engine) for _ in range(2)]
    engine.close()
    for found, rounded in errors:
        assert found < 1e-6
        assert rounded > 5e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_frequencies_are_those_of_a_plain_load(tmp_path, dtype, tied):
    """In bfloat16, frequencies of rotary embeddings would be rounded if DeepSpeed had its way."""
    zero.join_ranks(LearnerConfig())
    model = str(save(tiny_model(tied=tied, seed=4), tmp_path))
    found = loaded(model, LearnerConfig(zero_stage=3, dtype=dtype), ranks=1)
    assert found["differ"] == []
    assert found["whole"] == 0
    assert found["share"] >= found["all"] > 0


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_the_bucket_is_no_larger_than_the_gradients_and_counted_whole(model, stage, dtype):
    config = LearnerConfig(zero_stage=stage, dtype=dtype)
    engine = TrainingEngine(config, model=model, total_steps=1, seed=0)
    try:
        zero = engine.deepspeed.optimizer
        if stage < 3:
            # DeepSpeed makes these buffers in a backward pass, and drops them behind it.
            zero.setup_buckets()
            buffers = [buffer for bucket in zero.ipg_buckets.values() for buffer in bucket.buffer]
        else:
            buffers = [bucket.buffer for bucket in zero.ipg_buckets.values()]
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.deepspeed.module.parameters())
        size = ModelSize(parameters, hidden=128, inner=192, layers=2)
        assert sum(buffer.nbytes for buffer in buffers) == bucket_bytes(config, size) > 0
    finally:
        engine.close()


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
