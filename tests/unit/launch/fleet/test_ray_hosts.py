"""Hosts on Ray: which are started and drained, what an actor runs, and how its process ends; without Ray."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import main
from launch.errors import ConfigError
from launch.fleet import ray_hosts
from launch.fleet.engines import Launched, record
from launch.fleet.ray_actor import TASK, HostActor
from launch.fleet.ray_hosts import RETRY_S, Course, command_of, connect, keep, wanted_hosts, wish
from launch.fleet.site import RaySite, read_site
from tests.integration.protocol.encrypted_harness import until

HOST = """#!/bin/sh
# A host that keeps its ticket, notes its name, and drains at SIGTERM.
echo "$*" >arguments
echo "$OFFBEAT_TASK" >name
cat >ticket
[ -e once ] && exit 0
trap 'touch drained; exit 75' TERM
touch ready
while :; do sleep 0.05; done
"""


class FakeHosts:
    def __init__(self):
        self.started, self.drained, self.codes = [], [], {}

    def start(self, number):
        self.started.append(number)

    def drain(self, number):
        self.drained.append(number)

    def ended(self):
        codes, self.codes = self.codes, {}
        return codes


def test_hosts_that_end_come_back_or_stay_away_by_their_codes():
    hosts, course, said = FakeHosts(), Course(), []

    def look(count, now):
        keep(hosts, course, count, now, said.append)

    look(3, 0.0)
    assert hosts.started == [0, 1, 2]
    hosts.codes = {0: 75, 1: 0, 2: 65}
    look(3, 1.0)
    look(3, 1.0 + RETRY_S)
    # 75 comes back after a while; one that was drained by command, and one that is useless, stay away.
    assert hosts.started == [0, 1, 2, 0]
    hosts.codes = {0: "RayActorError: the owner died"}
    look(3, 20.0)
    look(3, 20.0 + RETRY_S)
    assert hosts.started == [0, 1, 2, 0, 0]
    assert "host 0 has ended: RayActorError: the owner died" in said


def test_fewer_hosts_drain_the_youngest_once_and_more_start_again():
    hosts, course = FakeHosts(), Course()
    for count, now in ((3, 0.0), (1, 1.0), (1, 2.0)):
        keep(hosts, course, count, now, print)
    assert hosts.drained == [2, 1]
    hosts.codes = {2: 0, 1: 75}
    keep(hosts, course, 1, 3.0, print)
    keep(hosts, course, 3, 3.0 + RETRY_S, print)
    assert hosts.started == [0, 1, 2, 1, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.dictionaries(st.integers(0, 5), st.sampled_from([0, 65, 75, 1])))
    )
)
def test_no_host_runs_twice_and_as_many_as_wanted_run_or_stay_away(steps):
    course, now = Course(), 0.0
    for count, codes in steps:
        now += RETRY_S
        for number, code in codes.items():
            if number in course.running:
                course.ended(number, code, now)
        now += RETRY_S
        before = set(course.running)
        start, drain = course.look(count, now)
        assert not before & set(start)
        assert set(drain) <= before
        assert set(range(count)) <= course.running | course.away
        assert {number for number in course.running if number >= count} <= course.draining


@pytest.fixture
def programs(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "offbeat"
    program.parent.mkdir()
    program.write_text(HOST)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return tmp_path / "there"


def test_an_actor_runs_a_host_with_its_ticket_and_drains_it(programs):
    actor, codes = HostActor(), []
    command = command_of(RaySite(setup="touch prepared", generators_per_host=2, grace_s=30.0))
    run = threading.Thread(target=lambda: codes.append(actor.run("the ticket", command, str(programs), 7)))
    run.start()
    until((programs / "ready").exists, "the host runs")
    actor.drain()
    run.join(60)
    assert codes == [75]
    assert (programs / "ticket").read_text() == "the ticket"
    assert (programs / "arguments").read_text() == "host --ticket - --generators 2 --actors 2 --grace 30\n"
    assert (programs / "name").read_text().startswith("7-")
    assert (programs / "drained").exists()
    assert (programs / "prepared").exists()

    (programs / "once").touch()
    assert HostActor().run("another", command, str(programs), 7) == 0
    # Asked to drain before there is a process, it ends all the same.
    (programs / "once").unlink()
    leaving = HostActor()
    leaving.drain()
    assert leaving.run("another", command, str(programs), 7) in (75, -signal.SIGTERM)


@pytest.mark.parametrize(
    "whole", [False, True], ids=["Ray kills the worker", "Ray kills the worker's children, too"]
)
def test_a_host_drains_if_its_worker_is_killed(programs, whole):
    """What Ray does if a node or the launching process dies."""
    program = (
        "import os, sys, threading\n"
        "from launch.fleet.ray_actor import HostActor\n"
        "from launch.fleet.ray_hosts import command_of\n"
        "from launch.fleet.site import RaySite\n"
        "print(HostActor().run('t', command_of(RaySite()), sys.argv[1], 0))\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program, str(programs)], env=dict(os.environ, PYTHONPATH=":".join(sys.path))
    )
    until((programs / "ready").exists, "the host runs", 60)
    if whole:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGKILL)
    worker.kill()
    worker.wait(60)
    until((programs / "drained").exists, "the host drains", 60)


def test_scale_writes_the_number_that_the_launching_process_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/r.launch")
    folder.mkdir(parents=True)
    (folder / ray_hosts.WISH).write_text(wish(RaySite(hosts=2)))
    record(folder, Launched("ray", {}, pid=1))
    assert main(["scale", "runs/r", "generators=+3"]) == 0
    assert wanted_hosts(folder) == 5
    assert json.loads((folder / ray_hosts.WISH).read_text())["options"]["max_restarts"] == -1
    assert main(["scale", "runs/r", "actors=9"]) == 1
    assert "ray.actors_per_host" in capsys.readouterr().err


def test_the_page_has_a_site_file_that_can_be_read(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "run" / "ray.md").read_text()
    path = tmp_path / "site.toml"
    path.write_text(textwrap.dedent(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1]))
    assert read_site(path).ray == RaySite(hosts=4, gpus=1.0, address="10.0.0.5")


def test_without_ray_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[ray\]'"):
        connect(RaySite())
    assert TASK == "OFFBEAT_TASK"
