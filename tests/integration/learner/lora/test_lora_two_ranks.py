"""Two learner processes under torchrun train the adapters that one process trains."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.update.engine import TrainingEngine
from tests.integration.learner.published import TIMED, weights_of
from tests.integration.learner.start_ranks import run_two_ranks
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.integration.learner.two_ranks import ADAPTERS, batches, settings

# Stage 3 is first, because a model must be cut before anything else has told DeepSpeed of the ranks.
CASES = [f"{stage}-float32-{ADAPTERS}" for stage in (3, 0, 1, 2)] + [f"2-bfloat16-{ADAPTERS}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tiny_model(tied=True, seed=4), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def out(model, tmp_path_factory):
    """Return the folder with the results of all cases; one start serves all, because imports take longest."""
    return run_two_ranks(model, tmp_path_factory.mktemp("out"), CASES, timeout_s=400)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_skip_save_and_resume(out, case):
    result = json.loads((out / case / "result.json").read_text())
    assert result["skipped"]
    assert result["unchanged"]
    assert result["client"] == {"cursor": 17}
    assert result["moved"]
    assert result["resumed_bit_equal"]


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_equal_one(model, out, stage):
    """The batches have unequal trajectories, or only one."""
    case = out / f"{stage}-float32-{ADAPTERS}"
    result = json.loads((case / "result.json").read_text())
    single = TrainingEngine(settings(stage, "float32", 1, adapters=True), model=model, total_steps=10, seed=5)
    before = weights_of(single)
    for batch, metrics in zip(batches(), result["metrics"], strict=True):
        expected = single.update(batch, current_version=0).metrics
        for name in expected.keys() - TIMED - {"learner/padding_fraction"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    found, expected = load_file(case / "trained.safetensors"), weights_of(single)
    single.close()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
    moved = [name for name in found if not torch.equal(found[name], before[name])]
    assert len(moved) == 14
    assert all(name.endswith("_proj.weight") for name in moved)


@pytest.mark.parametrize("stage", range(4))
def test_the_final_model_of_two_ranks_loads(out, stage):
    folder = out / f"{stage}-float32-{ADAPTERS}" / "final"
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    assert dict(lm.named_parameters()).keys() == stored.keys()
