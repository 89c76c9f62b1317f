"""Gradients of bfloat16 models are summed over micro-batches in float32."""

import pytest

from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from tests.integration.learner.large.gradient_sums import gradient_errors
from tests.integration.learner.tiny_qwen3 import save, tiny_model


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
