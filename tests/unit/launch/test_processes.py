"""Test what the supervisor does to a process: the environment it gets, and the stacks of one that hangs."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from launch import cli, errors
from launch.errors import RoleFailed
from launch.processes import Ranks, command_of_role, dump_stacks, kill, role_environment, spawn, usable_cores
from launch.run_file.load import check
from launch.supervise.panel import Panel
from launch.supervise.supervisor import train


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 2), ("100000 100000", 1), ("50000 100000", 1), ("9900000 100000", 2), ("", 2)],
)
def test_cores_are_those_that_the_container_may_use(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    limit = tmp_path / "cpu.max"
    limit.write_text(text)
    assert usable_cores(limit) == expected
    assert usable_cores(tmp_path / "none") == 2


def test_a_process_that_hangs_says_where_it_stands_before_it_is_killed(tmp_path):
    code = (
        "import faulthandler, signal, time\n"
        "faulthandler.register(signal.SIGUSR1, all_threads=True)\n"
        "print('ready', flush=True)\n"
        "def stands_here():\n"
        "    time.sleep(600)\n"
        "stands_here()\n"
    )
    child = spawn("hanging", [sys.executable, "-c", code], log=tmp_path / "log", env={})
    deadline = time.monotonic() + 60
    while "ready" not in child.tail() and time.monotonic() < deadline:
        time.sleep(0.01)
    dump_stacks(child)
    assert child.running
    assert kill(child)
    assert "in stands_here" in child.tail()


def test_roles_do_not_import_from_the_working_folder():
    assert role_environment(1, local_model=True)["PYTHONSAFEPATH"] == "1"


def test_a_role_of_one_process_needs_no_torchrun():
    for ranks in (None, Ranks()):
        command = command_of_role("learner", Path("run"), "--resume", ranks=ranks)
        assert command[1:] == ["-m", "launch.role", "learner", "run", "--resume"]


def test_ranks_of_one_host_meet_at_a_free_port_and_those_of_several_at_the_rendezvous():
    command = command_of_role("learner", Path("run"), ranks=Ranks(processes=2))
    assert command[1:6] == ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command = command_of_role(
        "learner", Path("run"), ranks=Ranks(1, nodes=2, node=1, rendezvous="10.0.0.1:29500")
    )
    place = "--nproc_per_node 1 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500"
    waits = ["--rdzv_conf", "timeout=600"]
    assert command[3:] == [*place.split(), *waits, "--module", "--", "launch.role", "learner", "run"]


@pytest.fixture
def learner_command(tmp_path, monkeypatch):
    """Return a function that runs `offbeat learner` up to the command that it becomes."""
    (tmp_path / "job.toml").write_text(
        '[model]\npath = "some/model"\n[env]\nname = "calculator"\n[run]\nname = "job"\n[learner]\nnodes = 2\n'
        'rendezvous = "10.0.0.1:29500"\n'
    )
    monkeypatch.chdir(tmp_path)
    became = []
    monkeypatch.setattr("os.execvpe", lambda _file, command, _env: became.append(command))

    def run(*arguments):
        code = cli.main(["learner", "job.toml", *arguments])
        return code, became.pop() if became else []

    return run


def test_a_further_host_of_the_learner_joins_with_one_command(learner_command, tmp_path, capsys):
    code, _ = learner_command("--node", "1")
    assert code == 1, "a later start may find the folder"
    assert "start the first host of the learner" in capsys.readouterr().err
    folder = tmp_path / "runs" / "job"
    folder.mkdir(parents=True)
    # The first host has begun, which is no obstacle for a further one.
    (folder / "metrics.jsonl").touch()
    code, command = learner_command("--node", "1")
    assert code == 0
    assert command[1:4] == ["-m", "launch.by_hand", "runs/job"]
    assert command[command.index("--node_rank") + 1] == "1"
    saved = command[command.index("--config") + 1]
    assert saved == "config-learner-node-1.json"
    assert json.loads((folder / saved).read_text())["learner"]["nodes"] == 2


def test_a_host_that_the_learner_does_not_have_is_refused(learner_command, capsys):
    assert learner_command("--node", "2")[0] == errors.FINAL
    assert "--node 2: learner.nodes is 2, so its hosts are 0 to 1" in capsys.readouterr().err


def test_the_first_host_removes_the_note_of_the_learner_before(learner_command, tmp_path):
    folder = tmp_path / "runs" / "job"
    folder.mkdir(parents=True)
    errors.leave_note(folder, "learner", errors.FINAL, "diverged")
    assert learner_command("--node", "1")[0] == 0
    assert errors.read_note(folder, "learner") == errors.FINAL
    addresses = "broker.endpoint=tcp://127.0.0.1:5755", "broker.http=127.0.0.1:5756"
    assert learner_command(*addresses)[0] == 0
    assert errors.read_note(folder, "learner") is None


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_that_fails_releases_the_other_hosts_of_its_learner(tmp_path, monkeypatch, nodes):
    def broken(*_arguments, **_named):
        raise RoleFailed("generator-0 ended with code 1")

    monkeypatch.setattr("launch.supervise.supervisor.prepare_model", lambda *_: None)
    monkeypatch.setattr("launch.supervise.supervisor.supervise", broken)
    learner = {"nodes": nodes} | ({"rendezvous": "10.0.0.1:29500"} if nodes > 1 else {})
    settings = {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": learner}
    config = check({**settings, "run": {"dir": str(tmp_path), "name": "job"}}, "a test")
    with Panel() as panel, pytest.raises(RoleFailed):
        train(config, resume=False, panel=panel)
    expected = errors.FINAL if nodes > 1 else None
    assert errors.read_note(tmp_path / "job", "learner") == expected
