"""Mistakes in a run file are found before anything starts, and the message names field, value and cure."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.config import check, load
from launch.errors import ConfigError
from launch.reference import reference

ROOT = Path(__file__).parents[2]
GOOD = {"model": {"path": "some/model"}, "env": {"name": "calculator"}}


def changed(**sections):
    data = {name: dict(section) for name, section in GOOD.items()}
    for name, section in sections.items():
        data.setdefault(name, {}).update(section)
    return data


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_loads(path):
    assert load(path).learner.steps > 0


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learner": {"learning_rate": 1e-3}}, ["learner.learning_rate", "unknown key", "0.001"]),
        ({"learner": {"steps": "many"}}, ["learner.steps", "'many'"]),
        ({"learner": {"steps": "3"}}, ["learner.steps", "'3'"]),
        ({"learner": {"steps": True}}, ["learner.steps", "True"]),
        ({"learner": {"optimizer": {"lr": float("inf")}}}, ["learner.optimizer.lr", "inf"]),
        ({"learner": {"optimizer": {"betas": [0.9, 2.0]}}}, ["betas", "2.0"]),
        ({"broker": {"endpoint": "tcp://0.0.0.0:5555"}}, ["broker.endpoint", "loopback"]),
        ({"broker": {"max_queued_tasks": 800}}, ["896", "max_queued_tasks is 800"]),
        ({"learner": {"data_timeout_s": 60.0}}, ["data_timeout_s 60", "raise it"]),
        ({"learner": {"step": 3}}, ["learner.step", "did you mean 'steps'"]),
        (
            {"learner": {"group_size": 16, "batch_trajectories": 8}},
            ["group_size is 16", "raise batch_trajectories"],
        ),
        ({"learner": {"group_size": 8, "batch_trajectories": 20}}, ["multiple", "use 16 or 24"]),
        ({"learner": {"group_size": 1, "batch_trajectories": 4}}, ["group_size is 1", "at least 2"]),
        (
            {
                "broker": {"max_queued_segments": 100},
                "learner": {"max_policy_lag": 3, "batch_trajectories": 64},
            },
            ["max_policy_lag 3", "max_queued_segments is 100", "never be reached"],
        ),
        ({"generator": {"max_model_len": 32}}, ["max_trajectory_tokens 256", "max_model_len 32"]),
        ({"learner": {"zero_stage": 0, "dtype": "bfloat16"}}, ["zero_stage 0", "use zero_stage 1"]),
        ({"run": {"mode": "sync"}, "learner": {"publish_every": 2}}, ["publish_every is 2"]),
        ({"generator": {"backend": "http"}}, ["generator.url is empty"]),
        ({"model": {"path": ""}}, ["model.path", "[model.tiny]"]),
        ({"learner": {"algorithm": {"updates_per_batch": 1000}}}, ["updates_per_batch is 1000"]),
        ({"learner": {"micro_batch_tokens": 64}}, ["micro_batch_tokens 64", "raise it"]),
    ],
)
def test_a_wrong_run_file_is_refused_with_the_cure(sections, words):
    with pytest.raises(ConfigError) as caught:
        check(changed(**sections), "run.toml")
    for word in words:
        assert word in str(caught.value)


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check(changed(learner={"group_size": 1, "batch_trajectories": 7}, generator={"backend": "http"}), "x")
    assert len(str(caught.value).splitlines()) == 2


def test_overrides_reach_nested_fields_and_keep_types(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[env]\nname = "calculator"\n')
    config = load(path, ["learner.optimizer.lr=1e-5", "run.name=abc", "learner.filter_uniform_groups=false"])
    assert config.learner.optimizer.lr == 1e-5
    assert config.run.name == "abc"
    assert config.learner.filter_uniform_groups is False


@pytest.mark.parametrize("override", ["learner.steps", "=3", "run.name.x=1"])
def test_an_override_that_cannot_be_meant_is_refused(tmp_path, override):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[run]\nname = "a"\n[env]\nname = "calculator"\n')
    with pytest.raises(ConfigError, match="override"):
        load(path, [override])


def test_missing_file_and_bad_toml(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bad.toml")


def test_lockstep_has_no_lag():
    assert check(changed(run={"mode": "sync"}), "x").max_policy_lag == 0


def test_the_reference_page_is_up_to_date():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


def test_the_command_line_starts_without_heavy_libraries():
    code = "import sys, launch.cli, launch.supervisor; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
