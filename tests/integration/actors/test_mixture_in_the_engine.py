"""A mixture of experts that a learner has trained reaches vLLM's CPU engine, and samples as transformers says."""

import pytest
from safetensors import safe_open

from actors.config import GeneratorConfig
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from tests.integration.actors.mixture_checks import check_new_experts
from tests.integration.learner.published import weights_of
from tests.integration.learner.tiny_mixture import save_mixture
from tests.trajectories import make_batch_of_groups

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
]


def train_once(model, folder):
    """Train one batch. Return the published weights, and a folder with the trained model."""
    config = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=200, max_policy_lag=4, zero_stage=0
    )
    engine = TrainingEngine(config, model=str(model), total_steps=10, seed=0)
    try:
        assert engine.update(make_batch_of_groups(2, 3), current_version=0).applied
        engine.save_pretrained(folder)
        return weights_of(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module", params=[32, 48], ids=["as wide as vLLM's kernel", "padded by vLLM"])
def mixture(request, tmp_path_factory):
    """Return the folders of a mixture before and after training, and the weights that the learner publishes."""
    root = tmp_path_factory.mktemp("mixture")
    before = save_mixture(root / "before", seed=0, expert_width=request.param)
    return before, root / "after", train_once(before, root / "after")


def test_the_engine_samples_from_the_trained_experts(mixture, tmp_path):
    before, after, weights = mixture
    with safe_open(before / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
    config = GeneratorConfig(kv_cache_mb=64, max_model_len=128)
    check_new_experts(config, before, after, weights, tmp_path, tolerance=1e-4)
