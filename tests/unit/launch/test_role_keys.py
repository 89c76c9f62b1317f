"""A role without the key of its name ends before anything costly begins."""

from pathlib import Path

import pytest

from launch import role
from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from protocol.errors import KeysUnusable
from protocol.security import key_files


@pytest.mark.parametrize(
    ("which", "name", "good"),
    [
        ("actor", "actor-gpu7-0", True),
        ("actor", "actor-gpu8", False),
        ("generator", "generator-0", False),
        ("learner", "", False),
    ],
)
def test_the_key_is_looked_for_before_a_model_is_made(tmp_path, monkeypatch, which, name, good):
    key_files.make(tmp_path / "all", ["broker", "generator", "actor", "actor-gpu7"])
    key_files.bundle(tmp_path / "all", "actor-gpu7", tmp_path / "keys")
    config = load(Path("recipes/spell_backward.toml"), [f"security.keys={tmp_path / 'keys'}"])
    assert isinstance(config, RunConfig)
    made = []

    def prepare(config):
        made.append(config)
        raise RuntimeError("it would be made")

    monkeypatch.setattr("launch.model.prepare", prepare)
    monkeypatch.setattr("launch.logs.configure", lambda name: None)
    with pytest.raises(RuntimeError if good else KeysUnusable):
        role.run(which, config, tmp_path, name=name)
    assert bool(made) == good
