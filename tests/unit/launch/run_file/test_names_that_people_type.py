"""Names that other programs have for methods and settings lead to ours."""

from pathlib import Path

import pytest

from launch.errors import ConfigError
from launch.run_file.load import (
    MEANT,
    MEANT_SETTINGS,
    check,
    load,
    located,
    method_file,
    run_files,
    sections_in,
)
from launch.run_file.recipes import find
from launch.run_file.sections import RunConfig


@pytest.mark.parametrize(("name", "recipe"), MEANT.items())
def test_other_names_of_methods_are_taken(name, recipe):
    assert method_file(name, Path("my.toml")) == run_files()[recipe]
    assert located(Path(name)) == run_files()[recipe]
    assert find(name).name == recipe


def test_the_names_of_the_field_are_recipes():
    assert load(Path("dapo")).learner.algorithm.surrogate.high == 0.28
    assert load(Path("dr-grpo")).learner.algorithm.advantage.scale == "none"
    assert load(Path("reinforce++")).learner.algorithm.advantage.kind == "batch_mean"


@pytest.mark.parametrize("setting", MEANT_SETTINGS)
def test_each_setting_that_is_named_is_there(setting):
    sections = [RunConfig]
    for name in setting.split("."):
        fields = [s.model_fields[name] for s in sections if name in s.model_fields]
        assert fields, setting
        sections = [inner for field in fields for inner in sections_in(field.annotation)]


@pytest.mark.parametrize(
    ("learner", "setting"),
    [
        ({"lr": 1e-5}, "learner.optimizer.lr"),
        ({"optimizer": {"learning_rate": 1e-5}}, "learner.optimizer.lr"),
        ({"num_generations": 8}, "learner.group_size"),
        ({"algorithm": {"beta": 0.04}}, "learner.algorithm.kl.coefficient"),
        ({"group_sise": 4}, "group_size"),
    ],
)
def test_a_setting_is_found_by_its_meaning(learner, setting):
    with pytest.raises(ConfigError, match=f"did you mean '{setting}'"):
        check({"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": learner}, "run.toml")
