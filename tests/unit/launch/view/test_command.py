"""Test that a run says how to look at it, and that `offbeat view` takes what it says."""

import shlex

import pytest

from launch import in_process
from launch.arguments import parser
from launch.commands.view import run_folders
from launch.run_file.load import check
from launch.supervise import supervisor
from launch.supervise.panel import Panel


class NoModel(Exception):
    """Ends a run before anything is started."""


def no_model(*_arguments):
    raise NoModel


def supervised(config):
    with Panel() as panel:
        supervisor.train(config, resume=False, panel=panel)


def alone(config):
    in_process.train_in_process(config, resume=False)


@pytest.mark.parametrize("train", [supervised, alone])
def test_a_run_prints_the_line_that_shows_it(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "prepare_model", no_model)
    monkeypatch.setattr("launch.model.prepare", no_model)
    # It would change the log of all tests.
    monkeypatch.setattr("launch.logs.configure", lambda _role: None)
    monkeypatch.chdir(tmp_path)
    settings = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "run": {"dir": "my runs", "name": "job"},
    }
    with pytest.raises(NoModel):
        train(check(settings, "a test"))
    said = "".join(capsys.readouterr())
    (line,) = [line for line in said.splitlines() if "to look at it in a browser: " in line]
    program, *words = shlex.split(line.partition("browser: ")[2])
    assert program == "offbeat"
    given = parser().parse_args(words)
    (folder,) = run_folders(given.runs)
    assert folder.samefile(tmp_path / "my runs" / "job")
