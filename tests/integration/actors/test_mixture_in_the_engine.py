"""A mixture of experts that a learner has trained reaches vLLM's CPU engine, and samples as transformers says."""

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from actors.config import GeneratorConfig
from learner.config import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from protocol.weights.files import write_version
from tests.integration.actors.generator_harness import Running
from tests.integration.learner.published import weights_of
from tests.integration.learner.tiny_mixture import save_mixture
from tests.integration.learner.tiny_qwen3 import VOCAB, score
from tests.trajectories import make_batch_of_groups

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

TOLERANCE = 1e-4
PROMPT = [3, 4, 5, 6, 7]


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


def largest_error(folder, answer):
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    expected = score(model, PROMPT, answer.ids)
    return max(abs(logp - other) for logp, other in zip(answer.logps, expected, strict=True))


def test_the_engine_samples_from_the_trained_experts(mixture, tmp_path):
    before, after, weights = mixture
    with safe_open(before / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
    manifest = write_version(
        tmp_path,
        run="test",
        epoch=0,
        version=1,
        shapes={name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()},
        tensors=((name, memoryview(tensor.numpy()).cast("B")) for name, tensor in weights.items()),
    )
    settings = {"max_tokens": 60, "stop_token_ids": [VOCAB], "seed": 1}
    running = Running(GeneratorConfig(kv_cache_mb=64, max_model_len=128), before)
    try:
        actor = running.actor()
        first = running.ask(actor, "first", PROMPT, **settings)
        running.update(manifest, version=1)
        second = running.ask(actor, "second", PROMPT, **settings)
    finally:
        running.close()
    assert set(first.versions) == {0}
    assert set(second.versions) == {1}
    assert largest_error(before, first) < TOLERANCE
    assert largest_error(after, second) < TOLERANCE
    # The two versions are far apart, so an engine that kept some old weights would be found.
    assert largest_error(before, second) > 100 * TOLERANCE
