"""The summary of a run is written before its picture, and neither takes the result with it."""

import errno
import json

import pytest

from launch.run_file.load import check
from launch.supervise import summary as summary_module
from launch.supervise.summary import COUNTS, Course, summary_rows, write_summary
from learner.run_files import METRICS, RESULT

FULL = OSError(errno.ENOSPC, "No space left on device")
COURSE = Course(
    ended_by="all steps done", wall_seconds=9.0, killed=[], restarts={"learner": 0}, restart_reasons=[]
)


@pytest.fixture
def folder(tmp_path):
    result = {
        "ended_by": "all steps done", "steps": 3, "policy_version": 3, "wall_seconds": 5.0, "evaluations": [],
        "parameters": {"trained": 9, "whole": 9}, "policy_lag": {"mean_versions": 1.0, "max_versions": 2},
        "skipped_steps": 0, "step_seconds": 5.0, "wait_seconds": 1.0, "update_seconds": 3.0, "publish_seconds": 0.1,
        **dict.fromkeys(COUNTS, 0), "trajectories_by_outcome": {}, "tokens_by_outcome": {},
        "episodes": {"episodes": 4, "failed": 0, "failures": [], "groups": 1, "uniform_groups": 0},
    }  # fmt: skip
    (tmp_path / RESULT).write_text(json.dumps(result))
    (tmp_path / METRICS).write_text("")
    return tmp_path


@pytest.fixture
def config(tmp_path):
    run = {"name": "exp", "dir": str(tmp_path)}
    return check({"run": run, "model": {"path": "some/model"}, "env": {"name": "calculator"}}, "run.toml")


def test_a_picture_that_cannot_be_drawn_is_a_remark(folder, config, monkeypatch):
    def fails(lines, evaluations, path, title):
        assert (folder / "summary.json").exists(), "the summary comes first"
        path.write_bytes(b"")
        raise FULL

    monkeypatch.setattr(summary_module, "draw_curve", fails)
    notes = []
    made = write_summary(config, folder, COURSE, notes.append)
    assert len(notes) == 1
    assert "the learning curve could not be drawn ([Errno 28]" in notes[0]
    assert not (folder / "learning_curve.png").exists(), "no picture of no bytes"
    assert json.loads((folder / "summary.json").read_text()) == made
    assert dict(summary_rows(made))["learning curve"] == "not drawn"


def test_a_full_disk_leaves_the_table_of_the_end(folder, config, monkeypatch):
    def fails(*_, **__):
        raise FULL

    monkeypatch.setattr(summary_module, "write_whole", fails)
    monkeypatch.setattr(summary_module, "draw_curve", fails)
    notes = []
    made = write_summary(config, folder, COURSE, notes.append)
    assert made["steps"] == 3
    assert [note.split(" could not")[0] for note in notes] == ["summary.json", "the learning curve"]
    assert str(folder / RESULT) in notes[0]
