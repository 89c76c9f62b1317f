"""Test that the buffer from which DeepSpeed reduces gradients is as large as `offbeat check` counts it."""

import pytest

from launch.preflight.memory import ModelSize, bucket_bytes
from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine


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
