"""vLLM's CPU engine says through which experts each token went, and transformers chooses the same ones."""

import pytest
from safetensors.torch import load_file

from actors.config import GeneratorConfig
from tests.integration.actors.generator_harness import Running
from tests.integration.actors.mixture_checks import (
    LONG_PROMPT,
    ROUTED,
    agreement,
    check_experts,
    check_experts_over_an_update,
    chosen,
    told,
)
from tests.integration.learner.tiny_mixture import save_mixture

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
]

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
