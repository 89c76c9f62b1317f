"""Test that lengths that a run file leaves out are those that its model allows."""

import json

import pytest

from launch.errors import ConfigError
from launch.run_file.load import load


@pytest.fixture
def job(tmp_path):
    """Return a function that writes a run file for a model folder with this config.json, and loads it."""

    def loaded(description: str, *overrides: str):
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(description)
        file = tmp_path / "job.toml"
        file.write_text(f'[model]\npath = "{model}"\n\n[env]\nname = "calculator"\n')
        file.write_text(file.read_text().replace("calculator", "calculator"))
        return load(file, overrides)

    return loaded


def test_a_model_with_a_smaller_limit_gets_it_as_longest_prompt_and_trajectory(job):
    config = job(json.dumps({"max_position_embeddings": 512}))
    assert config.generator.max_model_len == 512
    assert config.learner.sampling.max_trajectory_tokens == 512


@pytest.mark.parametrize(
    "description", ['{"max_position_embeddings": 8192}', "{}", '{"n_positions": 1024}', "not json", "[]"]
)
def test_other_models_keep_the_usual_length(job, description):
    # A folder without a readable config.json is refused when the run is examined, with the file's name.
    assert job(description).generator.max_model_len == 1024


def test_what_the_run_file_or_an_override_says_stays(job):
    # 600 is more than the model allows: it is refused when the run is examined, and not lowered in silence.
    config = job(json.dumps({"max_position_embeddings": 512}), "generator.max_model_len=600")
    assert config.generator.max_model_len == 600


def test_a_generator_section_of_a_wrong_type_is_still_refused(job):
    with pytest.raises(ConfigError, match="generator"):
        job(json.dumps({"max_position_embeddings": 512}), "generator=7")


@pytest.mark.parametrize("factor", ["Infinity", "NaN", "true", "-2"])
def test_a_factor_that_is_none_does_not_break_the_run_file(job, factor):
    rope = f'{{"rope_type": "linear", "factor": {factor}}}'
    assert job(f'{{"n_positions": 512, "rope_scaling": {rope}}}').generator.max_model_len == 512
    assert job('{"max_position_embeddings": true}').generator.max_model_len == 1024
