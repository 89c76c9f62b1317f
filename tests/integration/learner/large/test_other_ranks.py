"""A checkpoint resumes with a different number of ranks, at any ZeRO stage, without a change of any bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from learner.update.engine import TrainingEngine
from tests.integration.learner.published import assert_equal_checkpoints, weights_of
from tests.integration.learner.start_ranks import run_two_ranks
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.integration.learner.two_ranks import ONE, RESUME, batches, settings

STAGES = {
    f"1-float32-{RESUME}": 0,
    f"2-float32-{RESUME}": 1,
    f"3-float32-{RESUME}": 2,
    f"3-bfloat16-{RESUME}": 2,
    f"2-bfloat16-{RESUME}": 3,
}
"""ZeRO stage of the single rank, by the case of the two ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tiny_model(tied=True, seed=4), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def start(model):
    engines = []

    def make(case):
        dtype = case.split("-")[1]
        config = settings(STAGES[case], dtype, 1)
        engines.append(TrainingEngine(config, model=model, total_steps=10, seed=5))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def out(start, model, tmp_path_factory):
    """Return the folder where two ranks continued from the checkpoints of one."""
    folder = tmp_path_factory.mktemp("out")
    for case in STAGES:
        engine = start(case)
        for batch in batches()[1:]:
            engine.update(batch, current_version=0)
        engine.save(folder / ONE / case, {"cursor": 17})
    return run_two_ranks(model, folder, list(STAGES), timeout_s=240)


@pytest.mark.parametrize("case", STAGES)
def test_two_ranks_continue_what_one_has_begun(start, out, case):
    one, two = out / ONE / case, out / case
    assert_equal_checkpoints(two / "loaded", one)
    assert len(list(two.glob("loaded/step*/policy-rank*.safetensors"))) == 2
    single = start(case)
    single.load(one)
    expected = single.update(batches()[0], current_version=0).metrics
    found = json.loads((two / "result.json").read_text())
    tolerance = 1e-5 if "float32" in case else 5e-3
    for name in ("learner/loss", "learner/gradient_norm"):
        assert found[name] == pytest.approx(expected[name], rel=10 * tolerance, abs=tolerance), name
    weights = load_file(two / "trained.safetensors")
    for name, tensor in weights_of(single).items():
        torch.testing.assert_close(weights[name], tensor, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", STAGES)
def test_one_rank_continues_what_two_have_begun(start, out, tmp_path, case):
    single = start(case)
    assert single.load(out / case / "trained") == {"cursor": 17}
    assert (single.updates, single.optimizer_steps) == (3, 3)
    single.save(tmp_path, {})
    assert_equal_checkpoints(tmp_path, out / case / "trained")
    weights = load_file(out / case / "trained.safetensors")
    for name, tensor in weights_of(single).items():
        assert torch.equal(tensor, weights[name]), name
