"""When extensions of the broker are used, and when not."""

import os
import sys
import types

import pytest

from launch import compiled
from launch.errors import ConfigError


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins for the packages that are compiled, in a process that has loaded nothing of them."""
    for name in ("broker", "protocol"):
        package = types.ModuleType(name)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "units.py").write_text("x: int = 1\n")
        package.__path__ = [str(folder)]
        monkeypatch.setattr(compiled, name, package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "MODULES", ("nothing_loaded",))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_what_is_compiled_is_used_until_a_source_changes(packages):
    assert not compiled.use()
    made = compiled.folder()
    made.mkdir(parents=True)
    assert compiled.use()
    assert (sys.path[0], compiled.broker.__path__[0]) == (str(made), str(made / "broker"))
    assert compiled.folder() == made, "the sources are looked for where they are"
    (packages / "protocol" / "units.py").write_text("x: int = 2\n")
    assert compiled.folder() != made
    assert not compiled.use()


def test_modules_that_run_already_are_left_alone(packages, monkeypatch):
    compiled.folder().mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "broker.nothing_loaded", types.ModuleType("broker.nothing_loaded"))
    assert not compiled.use()


def test_what_another_user_has_made_is_not_loaded(packages, monkeypatch, caplog):
    made = compiled.folder()
    made.mkdir(parents=True)
    if os.getuid() == 0:  # root's files are everybody's to use
        os.chown(made, 4711, 4711)
    monkeypatch.setattr(compiled.os, "getuid", lambda: 4712)
    assert not compiled.use()
    assert "another user" in caplog.text


def test_what_cannot_be_compiled_says_why_and_leaves_nothing(packages, monkeypatch):
    monkeypatch.setattr(compiled, "MODULES", ("units",))
    (packages / "broker" / "units.py").write_text("x: int = 'a'\n")
    with pytest.raises(ConfigError, match=r"cannot be compiled:[\s\S]*Incompatible types[\s\S]*C compiler"):
        compiled.make()
    assert list((packages / "cache" / "offbeat").iterdir()) == []
