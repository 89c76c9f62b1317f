"""When extensions of the broker are used, and when not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import broker
import protocol
from launch import compiled
from launch.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder as `offbeat compile` leaves it, for sources in tmp_path; its extension is a module in Python."""
    for package in (broker, protocol):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "units.py").write_text("x: int = 1\n")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "MODULES", ("an_extension",))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = compiled.folder()
    for path in (folder.parent.parent, folder.parent, folder, folder / "broker"):
        path.mkdir(mode=0o700)
    (folder / "broker" / "an_extension.py").write_text("")
    yield folder
    sys.modules.pop("broker.an_extension", None)


def test_what_is_compiled_is_used_until_a_source_changes(made, tmp_path):
    assert compiled.use()
    assert sys.modules["broker.an_extension"].__file__ == str(made / "broker" / "an_extension.py")
    assert compiled.folder() == made, "the sources are looked for where they are"
    assert not compiled.use(), "what runs already is left alone"
    del sys.modules["broker.an_extension"]
    (tmp_path / "protocol" / "units.py").write_text("x: int = 2\n")
    assert compiled.folder() != made
    assert not compiled.use()


def test_what_cannot_be_loaded_leaves_the_sources(made, caplog):
    (made / "broker" / "an_extension.py").unlink()
    (made / "broker" / "an_extension.so").write_bytes(b"cut off")
    paths = list(sys.path), list(broker.__path__)
    assert not compiled.use()
    assert "cannot be loaded" in caplog.text
    assert paths == (sys.path, broker.__path__)


@pytest.mark.parametrize("what", ["owner", "mode", "parent", "link"])
def test_what_another_user_could_have_put_there_is_not_loaded(made, monkeypatch, caplog, tmp_path, what):
    if what == "owner":
        if os.getuid() == 0:  # root's files are everybody's to use
            os.chown(made / "broker", 4711, 4711)
        monkeypatch.setattr(compiled.os, "getuid", lambda: 4712)
    elif what == "link":
        made.rename(tmp_path / "elsewhere")
        made.symlink_to(tmp_path / "elsewhere")
    else:
        (made if what == "mode" else made.parent).chmod(0o777)
    assert not compiled.use()
    assert "is not used" in caplog.text


def test_a_process_without_a_home_runs_the_sources(made, monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert not compiled.use()
    assert "no home" in caplog.text
    with pytest.raises(ConfigError, match="no home"):
        compiled.make()


def test_what_cannot_be_compiled_says_why_and_leaves_nothing(made, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "MODULES", ("units",))
    (tmp_path / "broker" / "units.py").write_text("x: int = 'a'\n")
    with pytest.raises(ConfigError, match=r"cannot be compiled:[\s\S]*Incompatible types[\s\S]*C compiler"):
        compiled.make()
    assert list(made.parent.iterdir()) == [made]


def test_the_broker_s_process_has_loaded_nothing_of_it_when_it_looks():
    check = (
        "import sys, launch.role; from launch import compiled;"
        "print([m for m in compiled.MODULES if f'broker.{m}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
