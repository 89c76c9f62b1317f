"""Formulas of the user's own in the real engine: steps like those of shipped ones, and their hash in checkpoints."""

import shutil

import pytest
import torch

from learner.errors import FormulaError
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from tests.integration.learner.published import weights_of
from tests.methods import METHODS, OWN
from tests.trajectories import make_batch_of_groups

SHIPPED = {
    "surrogate": {"kind": "clip", "high": 0.28, "centre": "behaviour"},
    "corrections": [{"kind": "truncated", "ceiling": 2.0}],
    "advantage": {"kind": "group"},
    "updates_per_batch": 2,
}


@pytest.fixture
def start(model, engines):
    """Return a function that makes engines."""

    def make(algorithm):
        config = LearnerConfig(algorithm=AlgorithmConfig.model_validate(algorithm), micro_batch_tokens=40)
        engines.append(TrainingEngine(config, model=model, total_steps=10, seed=5))
        return engines[-1]

    return make


def test_a_copy_of_a_shipped_formula_gives_equal_steps(start):
    shipped, own = start(SHIPPED), start(METHODS["own"])
    for version in (1, 2):
        batch = make_batch_of_groups(3, 4)
        assert shipped.update(batch, current_version=version).applied
        assert own.update(batch, current_version=version).applied
    found, expected = weights_of(own), weights_of(shipped)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_resume_with_another_file_says_so(start, tmp_path):
    mine = tmp_path / "mine.py"
    shutil.copy(OWN, mine)
    engine = start({"surrogate": {"kind": f"{mine}:clip"}})
    engine.save(tmp_path / "checkpoints", {"step": 0})
    same = start({"surrogate": {"kind": f"{mine}:clip"}})
    same.load(tmp_path / "checkpoints")
    assert same.changed_formulas == []
    # A process reads a file once, so the other process has another file.
    other = tmp_path / "other.py"
    other.write_text(mine.read_text() + "\n# changed\n")
    changed = start({"surrogate": {"kind": f"{other}:clip"}})
    changed.load(tmp_path / "checkpoints")
    assert len(changed.changed_formulas) == 1
    assert changed.changed_formulas[0].startswith("the file of learner.algorithm.surrogate has changed: ")
    plain = start({})
    plain.load(tmp_path / "checkpoints")
    assert plain.changed_formulas[0].endswith("this process has no such formula")


def test_a_formula_that_cannot_be_loaded_ends_the_start(model):
    config = LearnerConfig.model_validate({"algorithm": {"surrogate": {"kind": f"{OWN}:no_such"}}})
    with pytest.raises(FormulaError, match="has no function 'no_such'"):
        TrainingEngine(config, model=model, total_steps=1, seed=0)
