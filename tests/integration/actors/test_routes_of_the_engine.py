"""vLLM's CPU engine says through which experts each token went, and transformers chooses the same ones."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.config import GeneratorConfig
from protocol.weights.files import write_version
from tests.integration.actors.generator_harness import Running
from tests.integration.learner.tiny_mixture import CHOSEN, LAYERS, save_mixture
from tests.integration.learner.tiny_qwen3 import VOCAB

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

PROMPT = [(7 * i) % 40 + 3 for i in range(70)]
CONFIG = GeneratorConfig(kv_cache_mb=64, max_model_len=256, routes=True, stream_interval=8)
SETTINGS = {"max_tokens": 40, "stop_token_ids": [VOCAB], "seed": 1}


def chosen(folder, token_ids):
    """Return the experts that transformers chooses for each token, [T, layers, experts of a layer], sorted."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    return np.stack([layer.topk(CHOSEN).indices.sort().values.numpy() for layer in logits], axis=1)


def told(answer):
    rows = [answer.routes[place] for place in sorted(answer.routes)]
    return np.sort(np.array(rows).reshape(len(rows), LAYERS, CHOSEN))


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
    actor = running.actor("first")
    first = running.ask(actor, "first", PROMPT, routes_from=0, **SETTINGS)
    everything = chosen(folders[0], [*PROMPT, *first.ids])
    assert sorted(first.routes) == list(range(len(PROMPT) + len(first.ids) - 1))
    np.testing.assert_array_equal(told(first), everything[:-1])
    # The next turn of a conversation: its beginning is in the prefix cache, and the actor knows all rows but the last.
    longer = [*PROMPT, *first.ids, 5, 6]
    after = len(longer) - 3
    second = running.ask(actor, "second", longer, routes_from=after, **SETTINGS)
    assert sorted(second.routes) == list(range(after, len(longer) + len(second.ids) - 1))
    np.testing.assert_array_equal(told(second), chosen(folders[0], [*longer, *second.ids])[after:-1])
    # Cached blocks keep their rows.
    again = running.ask(actor, "again", PROMPT, routes_from=0, **SETTINGS)
    np.testing.assert_array_equal(told(again)[: len(PROMPT)], everything[: len(PROMPT)])
    assert not running.ask(actor, "none", PROMPT, **SETTINGS).routes


def test_an_engine_that_divides_its_layers_records_experts(folders):
    """Its engine process has no worker, and nobody but the plugin lets vLLM take the setting there."""
    running = Running(CONFIG.model_copy(update={"tensor_parallel_size": 2}), folders[0])
    try:
        answer = running.ask(running.actor("divided"), "divided", PROMPT, routes_from=0, **SETTINGS)
    finally:
        running.close()
    ids = [*PROMPT, *answer.ids]
    assert sorted(answer.routes) == list(range(len(ids) - 1))
    np.testing.assert_array_equal(told(answer), chosen(folders[0], ids)[:-1])


def test_rows_stay_those_of_the_pass_that_sampled_when_weights_change(running, folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders[1])
    shapes = {}
    from safetensors.torch import load_file

    weights = load_file(folders[1] / "model.safetensors")
    shapes = {name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()}
    tensors = ((name, memoryview(tensor.numpy()).cast("B")) for name, tensor in weights.items())
    manifest = write_version(tmp_path, run="test", epoch=0, version=1, shapes=shapes, tensors=tensors)
    del model
    actor = running.actor("second")
    actor.ask("long", PROMPT, **{**SETTINGS, "max_tokens": 150}, routes_from=0)
    running.until(lambda: (actor.poll(), len(actor.answers["long"].ids) >= 8)[1])
    running.update(manifest, version=1)
    running.until(lambda: (actor.poll(), actor.answers["long"].finish_reason)[1])
    answer = actor.answers["long"]
    assert set(answer.versions) == {0, 1}
    ids = [*PROMPT, *answer.ids]
    assert sorted(answer.routes) == list(range(len(ids) - 1))
    sampled_by = np.array([*[0] * len(PROMPT), *answer.versions])
    old, new = (chosen(folder, ids) for folder in folders)
    rows, first = told(answer), int(np.argmax(sampled_by == 1))
    # The token before the first of version 1 was computed again with version 1, or it would not have sampled it.
    np.testing.assert_array_equal(rows[: first - 1], old[: first - 1])
    np.testing.assert_array_equal(rows[first - 1 :], new[first - 1 : -1])
    assert (old != new).any()
