"""`offbeat launch --on ssh` starts the head here, and hosts with tickets through standard input; with stand-ins."""

import json
import os
import signal
import subprocess

import pytest

from launch.fleet import engines
from launch.fleet.engines import Launched, hold_by_ssh, launch_folder, new_tickets, write_files
from launch.fleet.job import Job
from launch.fleet.render import render
from launch.fleet.site import Site, SshSite
from launch.fleet.ticket import read_ticket, secrets_of
from launch.run_folder import CONFIG, save_config
from protocol.security import key_files
from tests.unit.launch.fleet.test_ticket import settings

OFFBEAT = """#!/bin/sh
# The head waits for both hosts; a host keeps the ticket that it reads, and fails once.
case $1 in
train) touch runs/run/config.json; while [ ! -e gpu7/done ] || [ ! -e gpu8/done ]; do sleep 0.1; done ;;
host)
    umask 077
    cat >ticket
    [ -e failed ] || { touch failed; exit 255; }
    touch done ;;
esac
"""
SSH = """#!/bin/sh
# Runs the last word in the folder of the host before it, as sshd would, and notes how it was called.
echo "$*" >>calls
for last; do host=$command; command=$last; done
mkdir -p "${host#*@}"
cd "${host#*@}" && exec sh -c "$command"
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("offbeat", OFFBEAT), ("ssh", SSH)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr("launch.fleet.render.RETRY_S", 0)
    monkeypatch.setattr("launch.fleet.engines.LOOK_S", 0.1)
    monkeypatch.chdir(tmp_path)


def test_each_host_gets_its_ticket_and_is_started_again_after_a_fault(programs, tmp_path):
    config = settings(tmp_path)
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    save_config(config, run / CONFIG)
    key_files.make(run / "keys")
    site = Site(ssh=SshSite(hosts=("gpu7", "me@gpu8"), folder=".", address="10.0.0.5"))
    job, said = Job("run.toml", (), config), []
    assert hold_by_ssh(job, site, render(job, site, "ssh"), said.append) == 0
    assert "hosts: gpu7, me@gpu8" in said[1]
    calls = (tmp_path / "calls").read_text()
    assert calls.count("offbeat host --ticket -") == 4, "each host was started twice"
    for host in ("gpu7", "gpu8"):
        ticket = read_ticket(str(tmp_path / host / "ticket"), {})
        assert ticket.host == host
        assert ticket.config.broker.endpoint == "tcp://10.0.0.5:5755"
        assert not any(secret in calls for secret in secrets_of(ticket))
    assert json.loads((tmp_path / "runs" / "run.launch" / "launch.json").read_text())["engine"] == "ssh"


def test_a_resumed_run_gives_no_tickets_of_its_earlier_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = settings(tmp_path)
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    save_config(config, run / CONFIG)
    os.utime(run / CONFIG, (1.0, 1.0))
    key_files.make(run / "keys")
    site = Site(ssh=SshSite(hosts=("gpu7",), folder=".", address="10.0.0.5"))
    job, folder = Job("run.toml", (), config), launch_folder(config)
    write_files(render(job, site, "ssh"), folder)
    names = {"gpu7": {"host": "gpu7"}}
    assert new_tickets(job, folder, names, "10.0.0.5") == {}
    save_config(config, run / CONFIG)
    assert list(new_tickets(job, folder, names, "10.0.0.5")) == ["gpu7"]


def test_stop_ends_the_process_that_was_started_and_no_later_one_with_its_id(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "LOOK_S", 0.01)
    (tmp_path / "r.launch").mkdir()
    said = []
    with subprocess.Popen(["sleep", "60"]) as head:
        try:
            began = engines._start_of(head.pid)
            for other in ("", began + "1"):
                engines.record(tmp_path / "r.launch", Launched("ssh", {}, pid=head.pid, started=other))
                engines.stop(tmp_path / "r", said.append)
            assert head.poll() is None
            assert said == [f"process {head.pid} has ended already"] * 2
            engines.record(tmp_path / "r.launch", Launched("ssh", {}, pid=head.pid, started=began))
            engines.stop(tmp_path / "r", said.append)
        finally:
            head.kill()
    assert head.returncode == -signal.SIGTERM
    engines.stop(tmp_path / "r", said.append)
    assert said[-1] == f"process {head.pid} has ended already"


def test_a_host_script_does_not_outlive_a_launcher_that_was_killed(programs, tmp_path):
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\nexit 255\n")
    files = render(Job("run.toml", (), settings(tmp_path)), Site(ssh=SshSite(hosts=("gpu7",))), "ssh")
    (tmp_path / "host.sh").write_text(files["host.sh"])
    (tmp_path / "t").touch()
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    ended = subprocess.run(
        ["bash", "host.sh", "gpu7", "t"],
        env=os.environ | {"OFFBEAT_LAUNCHER": str(launcher.pid)},
        timeout=60,
        check=False,
    )
    assert ended.returncode == 75
