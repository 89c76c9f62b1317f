"""At ZeRO stage 3 a model is cut while it is loaded, and nothing of it changes."""

import pytest

from learner.settings.learner import LearnerConfig
from learner.update import deepspeed_zero as zero
from tests.integration.learner.large.loading import loaded
from tests.integration.learner.tiny_qwen3 import save, tiny_model


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
