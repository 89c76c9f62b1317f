"""A supervised run whose advice acts: it begins with too few or too many generators, and their number moves."""

import sys
import threading
import time
from pathlib import Path

import pytest

from launch import run_folder
from launch.commands.status import show
from launch.run_file.load import check
from launch.supervise.broker_status import fetch
from launch.supervise.crew import Crew
from launch.supervise.supervisor import supervise
from tests.integration.actors.actor_harness import ENV_FILE
from tests.integration.hosts.hosts_harness import model_of_test
from tests.integration.launch.test_supervisor import ROOT, Silent

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
DEADLINE_S = 400.0
ROLE = "tests.integration.launch.counting_run"


class Run:
    """A run of real processes without a model, and what its status said."""

    def __init__(self, folder: Path, generators: int) -> None:
        model = model_of_test(folder / "model")
        (folder / "counting.py").write_text(ENV_FILE)
        settings = {
            "run": {"name": "run", "dir": str(folder)},
            "model": {"path": str(model)},
            "env": {"name": f"{folder / 'counting.py'}:Counting", "params": {"turns": 2}},
            "generator": {"count": generators, "max_model_len": 256},
            "actor": {"count": 1, "concurrent_episodes": 32, "max_turns": 8},
            "fleet": {"auto": True, "generators": [1, 3]},
        }
        self.folder, self.panel = folder / "run", Silent()
        self.config = run_folder.with_ports(check(settings, "a test"))
        self.folder.mkdir()
        for name in (run_folder.CONFIG, run_folder.ASKED):
            run_folder.save_config(self.config, self.folder / name)
        self.crew = Crew(self.config, self.folder, note=self.panel.note)
        self.fault: BaseException | None = None
        self.page = ""

    def go_on_until(self, here: int, capsys) -> None:
        """Supervise until as many generators were asked for, and are here."""
        watcher = threading.Thread(target=self._watch, args=(here, capsys))
        watcher.start()
        try:
            supervise(self.crew, self.config, self.folder, self.panel, self.panel, resume=False)
        finally:
            self.crew.stop()
            watcher.join(DEADLINE_S)
        if self.fault is not None:
            raise self.fault

    def _watch(self, here: int, capsys) -> None:
        try:
            self._await(here, capsys)
        except BaseException as fault:
            self.fault = fault
        finally:
            (self.folder / "enough").touch()

    def _await(self, here: int, capsys) -> None:
        keys = run_folder.http_keys(self.config, run_folder.keys_folder(self.config, self.folder))
        deadline, last = time.monotonic() + DEADLINE_S, {}
        while time.monotonic() < deadline:
            try:
                last = fetch(self.config.broker.http, keys=keys)
            except Exception:
                time.sleep(0.2)
                continue
            there = [peer for peer in last["peers"] if peer["role"] == "generator"]
            asked = any(f", {here} wanted;" in note for note in self.panel.notes)
            if asked and len(there) == here and last["fleet"]["wanted"]["generators"] == here:
                capsys.readouterr()
                assert show(str(self.folder), watch=False, as_json=False) == 0
                self.page = capsys.readouterr().out
                return
            time.sleep(0.5)
        raise AssertionError(f"{here} generators were never there: {last.get('fleet')}; {self.panel.notes}")


@pytest.fixture
def made(tmp_path, monkeypatch):
    def command(role, run_dir, *arguments, ranks=None):
        return [sys.executable, "-m", ROLE, role, str(run_dir), *arguments]

    monkeypatch.setattr("launch.supervise.crew.command_of_role", command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(generators, *, pace):
        # One generator samples at most 4 / 0.1 = 40 tokens per second.
        for name, value in (("PAUSE_S", 0.1), ("PLACES", 4), ("BATCH", 8), ("PACE", pace)):
            monkeypatch.setenv(f"COUNTING_{name}", str(value))
        return Run(tmp_path, generators)

    return make


def test_too_few_generators_become_more(made, capsys):
    run = made(1, pace=60.0)
    run.go_on_until(2, capsys)
    assert "\nfleet    " in run.page
    assert "\ngenerator-1  " in run.page
    said = next(note for note in run.panel.notes if note.startswith("generators: 1 now, 2 wanted"))
    assert "the supervisor of the head starts 1: the learner is idle" in said


def test_too_many_generators_become_fewer(made, capsys):
    run = made(3, pace=10.0)
    run.go_on_until(1, capsys)
    assert "\nfleet    " in run.page
    assert "\ngenerator-0  " in run.page
    said = next(note for note in run.panel.notes if note.startswith("generators: 3 now, 1 wanted"))
    assert "the supervisor of the head drains 2: the learner is never idle" in said
