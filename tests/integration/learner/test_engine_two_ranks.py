"""Two learner processes under torchrun compute what one process computes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from learner.update.engine import TrainingEngine
from tests.integration.learner.published import TIMED, weights_of
from tests.integration.learner.start_ranks import run_two_ranks
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.integration.learner.two_ranks import SUMS, batches, settings

CASES = [
    # First, because a model must be cut before anything else has told DeepSpeed of the ranks.
    "3-float32",
    "0-float32",
    "1-float32",
    "2-float32",
    "2-bfloat16",
    f"2-bfloat16-{SUMS}",
    f"3-bfloat16-{SUMS}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tiny_model(tied=False, seed=4), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def out(model, tmp_path_factory):
    """Return the folder with the results of all cases; one start serves all, because imports take longest."""
    return run_two_ranks(model, tmp_path_factory.mktemp("out"), CASES, timeout_s=240)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_one(model, out, stage):
    """The batches have unequal trajectories, or only one; a NaN, a checkpoint and a resume follow."""
    result = json.loads((out / f"{stage}-float32" / "result.json").read_text())
    single = TrainingEngine(settings(stage, "float32", 1), model=model, total_steps=10, seed=5)
    for batch, metrics, tokens in zip(batches(), result["metrics"], result["tokens"], strict=True):
        expected = single.update(batch, current_version=0).metrics
        assert tokens == sum(t.action_tokens for t in batch) == metrics["learner/trained_tokens"]
        for name in expected.keys() - TIMED - {"learner/padding_fraction"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    found, expected = load_file(out / f"{stage}-float32" / "trained.safetensors"), weights_of(single)
    single.close()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
    assert result["skipped"]
    assert result["unchanged"]
    assert result["client"] == {"cursor": 17}
    assert result["moved"]
    assert result["resumed_bit_equal"]


def test_two_ranks_in_bfloat16(out):
    result = json.loads((out / "2-bfloat16" / "result.json").read_text())
    assert result["skipped"]
    assert result["unchanged"]
    assert result["moved"]
    assert result["resumed_bit_equal"]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_in_bfloat16_are_summed_in_float32(out, stage):
    """Only the sum of the two ranks for each pair of micro-batches is rounded, which does not add up."""
    found, rounded = json.loads((out / f"{stage}-bfloat16-{SUMS}" / "result.json").read_text())["errors"]
    assert found < rounded / 5
    assert rounded > 5e-3


def test_a_rank_never_loads_more_than_its_share_at_stage_3(out):
    loaded = json.loads((out / f"3-bfloat16-{SUMS}" / "result.json").read_text())["loaded"]
    assert loaded["differ"] == []
    assert loaded["whole"] == 0
    # Parameters are cut one by one, and padded.
    assert loaded["all"] / 2 <= loaded["share"] < loaded["all"] / 2 + 50
