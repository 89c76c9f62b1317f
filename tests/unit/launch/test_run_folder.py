"""A run folder that cannot be made, or lies on a disk that is nearly full, is refused before anything starts."""

import os
import shutil

import pytest

from launch import run_folder
from launch.cli import main
from launch.errors import ConfigError
from launch.run_file.load import check


def config(tmp_path, directory="runs", **journal):
    return check(
        {
            "run": {"name": "exp", "dir": str(tmp_path / directory)},
            "model": {"path": "some/model"},
            "env": {"name": "calculator"},
            "broker": {"journal": journal},
        },
        "run.toml",
    )


@pytest.fixture
def places(tmp_path):
    (tmp_path / "afile").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    return ["afile/mine", "/proc/x", *([] if os.getuid() == 0 else ["closed"])]


def test_a_folder_that_cannot_be_written_is_refused_by_check_and_at_creation(tmp_path, places):
    for directory in places:
        for attempt in (
            run_folder.check_place,
            lambda c: run_folder.create(c, resume=False),
            run_folder.join,
        ):
            ports = {"endpoint": "tcp://127.0.0.1:5755", "http": "127.0.0.1:5756"}
            settings = config(tmp_path, directory)
            settings = settings.model_copy(update={"broker": settings.broker.model_copy(update=ports)})
            with pytest.raises(ConfigError, match=r"^run\.dir: cannot write in .* \(.*\); choose a folder"):
                attempt(settings)


def test_check_on_the_command_line_refuses_it_without_a_traceback(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "some/model"\n[env]\nname = "calculator"\n[run]\ndir = "/proc/x"\n')
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().err.startswith("offbeat check: run.dir: cannot write in /proc/x (")


def test_the_check_leaves_nothing_behind(tmp_path):
    run_folder.check_place(config(tmp_path, "a/b/runs"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 96 * 10**7, 4 * 10**7)
    )
    with pytest.raises(ConfigError, match=r"40\.0 MB free, but broker\.journal\.min_free_bytes is 67\.1 MB"):
        run_folder.check_place(config(tmp_path))
    run_folder.check_place(config(tmp_path, min_free_bytes=10**7))
