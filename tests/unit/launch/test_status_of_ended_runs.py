"""`offbeat status` of a run whose learner has ended, and which has no summary."""

import json
import os
import types

import pytest

from launch.commands import status
from launch.errors import FINAL, NothingTrained, leave_note
from launch.run_file.load import check
from launch.run_folder import BY_HAND, save_config, with_ports
from launch.supervise.supervisor import how_it_ended


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run that was started by hand; its broker's address answers nobody."""
    folder = tmp_path / "runs" / "hand"
    folder.mkdir(parents=True)
    settings = {"run": {"name": "hand", "dir": str(tmp_path / "runs")}, "model": {"path": "some/model"}}
    config = with_ports(check({**settings, "env": {"name": "calculator"}}, "run.toml"))
    for name in (BY_HAND, "config-broker.json"):
        save_config(config, folder / name)
        os.utime(folder / name, (1000, 1000))
    (folder / "epoch").write_text("1")
    os.utime(folder / "epoch", (1000, 1000))
    return folder


def write_result(folder, **result):
    known = {"ended_by": "all steps done", "steps": 30, "policy_version": 30}
    (folder / "result.json").write_text(json.dumps(known | result))


def shown(folder, capsys):
    code = status.show(str(folder), watch=False, as_json=False)
    return code, capsys.readouterr().out


def test_a_run_that_is_done_says_so_without_a_summary(folder, capsys):
    write_result(folder)
    (folder / "model").mkdir()
    code, said = shown(folder, capsys)
    assert code == 0
    assert said.startswith("run hand is over: all steps done\n  steps, policy version  30, 30\n")
    assert str(folder / "model") in said
    assert "start its broker again" not in said


def test_nothing_trained_is_said_in_the_first_line(folder, capsys):
    write_result(folder, steps=0, ended_by="time limit")
    assert shown(folder, capsys) == (
        0,
        "run hand is over: ended before the first step: time limit; nothing was trained\n",
    )


@pytest.mark.parametrize("steps", [0, 30])
def test_an_evaluation_is_over_and_is_no_run_that_trained_nothing(folder, capsys, steps):
    """`offbeat eval` writes a result of its own: of a model its steps are 0, and of a checkpoint the run's."""
    found = {"ended_by": "all sets evaluated", "steps": steps, "wall_seconds": 1.0, "evaluations": [{}, {}]}
    (folder / "result.json").write_text(json.dumps(found))
    code, said = shown(folder, capsys)
    assert code == 0
    assert said.startswith("run hand is over: all sets evaluated\n  sets evaluated         2\n")


@pytest.mark.parametrize(
    "content", [{"twice": 0}, {"ended_by": "time limit", "policy_version": 3}, [7], "done"]
)
def test_a_result_of_another_program_is_named_and_not_read(folder, capsys, content):
    (folder / "result.json").write_text(json.dumps(content))
    code, said = shown(folder, capsys)
    assert code == 0
    assert said.startswith("run hand is over: the result has not what a learner writes\n")
    assert str(folder / "result.json") in said


def test_the_last_line_says_why_nothing_was_trained(folder, capsys):
    row = {"kind": "RuntimeError", "message": "judge is down", "place": "r.py:5", "fault": True, "count": 256}
    episodes = {"episodes": 259, "failed": 256, "failures": [row], "groups": 0, "uniform_groups": 0}
    write_result(folder, steps=0, ended_by="time limit", episodes=episodes)
    assert shown(folder, capsys)[1] == (
        "run hand is over: ended before the first step: time limit; nothing was trained, because 99 % of episodes "
        "failed: RuntimeError: judge is down in r.py:5\n"
    )
    write_result(folder, steps=0, ended_by="Ctrl-C", episodes=episodes)
    with pytest.raises(NothingTrained, match="nothing was trained, because 99 % of episodes failed: Runtime"):
        how_it_ended(folder, types.SimpleNamespace(word=""))


def test_a_final_error_of_the_learner_is_the_end_of_the_run(folder, capsys):
    leave_note(folder, "learner", FINAL, "NothingToLearn: every episode fails")
    code, said = shown(folder, capsys)
    assert (code, said) == (
        0,
        "run hand is over: the learner ended for good: NothingToLearn: every episode fails\n",
    )


def test_a_run_that_was_begun_again_is_not_over(folder, capsys):
    write_result(folder)
    os.utime(folder / "result.json", (500, 500))
    code, said = shown(folder, capsys)
    assert code == 1
    assert "the broker does not answer" in said


def test_the_log_of_a_broker_is_found_from_any_folder(folder, capsys, monkeypatch, tmp_path):
    (folder / "logs").mkdir()
    (folder / "logs" / "broker.log").write_text("the last words\n")
    state = {
        "pid": 1,
        "http": "",
        "processes": {"broker": {"pid": 4_000_000, "log": "runs/hand/logs/broker.log"}},
    }
    (folder / "supervisor.json").write_text(json.dumps(state))
    monkeypatch.chdir(tmp_path / "runs")
    assert "the last words" in shown(folder, capsys)[1]


def test_a_version_that_was_not_heard_yet_has_no_number_in_the_table():
    peer = {
        "name": "g",
        "busy": False,
        "progress": 0.0,
        "stalled_s": 0.0,
        "silent_s": 0.1,
        "host": "h",
        "pid": 1,
    }
    for version, shown in ((None, "-"), (0, "0"), (7, "7")):
        _, row = status.table([{**peer, "policy_version": version}], {})
        assert row.split()[3] == shown
    _, row = status.table([peer], {})
    assert row.split()[3] == "-"


def test_who_was_asked_to_end_leaves_and_does_not_join():
    peer = {
        "name": "actor-0",
        "busy": True,
        "progress": 0.0,
        "stalled_s": 0.0,
        "silent_s": 0.1,
        "host": "h",
        "pid": 1,
    }
    alive = {"pid": os.getpid(), "restarts": 0}
    processes = {
        "actor-0": {**alive, "leaving": True},
        "actor-1": {**alive, "leaving": True},
        "actor-2": alive,
    }
    states = {row.split()[0]: row.split()[1] for row in status.table([peer], {"processes": processes})[1:]}
    assert states == {"actor-0": "leaving", "actor-1": "leaving", "actor-2": "joining"}
    _, row = status.table([{**peer, "leaving": True}], {})
    assert row.split()[1] == "leaving"
