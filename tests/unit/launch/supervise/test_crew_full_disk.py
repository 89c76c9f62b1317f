"""A full disk ends no run: the supervisor writes when there is room again."""

import errno
import json
from types import SimpleNamespace

import pytest

from launch.processes import Child
from launch.run_file.load import check
from launch.supervise import crew as crew_module
from launch.supervise.crew import START_RETRY_S, STATE_FILE, Crew
from launch.supervise.panel import Panel

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def notes():
    return []


@pytest.fixture
def spawned(monkeypatch):
    """Return a record of the fake processes started in place of real ones; while ``full``, none can start."""
    found = SimpleNamespace(children=[], full=False)

    def spawn(name, command, *, log, env):
        if found.full:
            raise FULL
        process = SimpleNamespace(pid=len(found.children) + 1, returncode=None)
        process.poll = lambda: process.returncode
        child = Child(name, command, process, log)
        found.children.append(child)
        return child

    monkeypatch.setattr(crew_module, "spawn", spawn)
    return found


@pytest.fixture
def crew(tmp_path, notes, spawned):
    settings = {"model": {"path": "none"}, "env": {"name": "calculator"}, "actor": {"count": 1}}
    crew = Crew(check(settings, "test"), tmp_path / "run", note=notes.append)
    crew.broker_answered = True
    return crew


def state(crew):
    return json.loads((crew._folder / STATE_FILE).read_text())["processes"]


def test_a_state_that_cannot_be_written_is_written_later(crew, notes):
    # The folder does not exist yet.
    crew.start(["broker", "learner"], resume=False)
    crew.revive(1.0)
    assert len(notes) == 1
    assert "offbeat status" in notes[0]
    crew._folder.mkdir()
    crew.revive(2.0)
    assert state(crew)["learner"]["pid"] == 2
    assert len(notes) == 1


def test_a_process_that_cannot_be_started_is_started_later(crew, notes, spawned):
    crew._folder.mkdir()
    crew.start(["broker", "generator-0"], resume=False)
    spawned.children[1].process.returncode, spawned.full = 1, True
    crew.revive(10.0)
    crew.revive(10.0 + START_RETRY_S / 2)
    assert [note for note in notes if "cannot be started" in note] == [
        "generator-0 cannot be started: [Errno 28] No space left on device; trying again in 2 s"
    ]
    spawned.full = False
    crew.revive(10.1 + START_RETRY_S)
    assert crew.running("generator-0")
    assert state(crew)["generator-0"] | {"log": ""} == {
        "pid": 3, "restarts": 1, "log": "", "last_reason": "generator-0 ended with code 1",
    }  # fmt: skip


def test_a_line_that_cannot_be_written_is_lost(monkeypatch):
    def full(*_, **__):
        raise FULL

    panel = Panel()
    monkeypatch.setattr(panel._console, "print", full)
    panel.note("something")
