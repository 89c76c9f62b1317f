"""A mixture of experts that a learner trained samples in vLLM's CPU engine, which says which experts a token met."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from actors.config import GeneratorConfig
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from tests.integration.actors.generator_harness import Running
from tests.integration.actors.mixture_checks import (
    LONG_PROMPT,
    ROUTED,
    agreement,
    check_experts,
    check_experts_over_an_update,
    check_new_experts,
    chosen,
    told,
)
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


CONFIG = GeneratorConfig(kv_cache_mb=64, max_model_len=256, routes=True, stream_interval=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return [save_mixture(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def running(folders):
    running = Running(CONFIG, folders[0])
    yield running
    running.close()


def test_experts_are_those_of_transformers_and_go_on_where_the_actor_asks(running, folders):
    check_experts(running, folders[0])


def test_rows_stay_those_of_the_pass_that_sampled_when_weights_change(running, folders, tmp_path):
    weights = load_file(folders[1] / "model.safetensors")
    check_experts_over_an_update(running, *folders, weights, tmp_path)


def test_an_engine_that_divides_its_layers_records_experts(folders):
    """Its engine process has no worker, and nobody but the plugin lets vLLM take the setting there."""
    divided = Running(CONFIG.model_copy(update={"tensor_parallel_size": 2}), folders[0])
    try:
        answer = divided.ask(divided.actor("divided"), "divided", LONG_PROMPT, routes_from=0, **ROUTED)
    finally:
        divided.close()
    ids = [*LONG_PROMPT, *answer.ids]
    assert sorted(answer.routes) == list(range(len(ids) - 1))
    assert agreement(told(answer), chosen(folders[0], ids)[:-1]) == 1
