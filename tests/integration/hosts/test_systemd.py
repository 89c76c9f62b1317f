"""A real systemd, as the first process of namespaces of its own, runs the rendered units of a host and of a head."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.cli import main
from launch.fleet.job import Job
from launch.fleet.render import render
from launch.fleet.site import Site, SystemdSite
from launch.processes import free_port
from launch.run_file.load import load
from protocol.messages.peers import Goodbye
from protocol.security import key_files
from tests.campaigns.faults.proof import prove
from tests.integration.hosts.counted_head import ENOUGH, CountedRun
from tests.integration.hosts.fleet_harness import OFFBEAT, Fleet
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT
from tests.integration.hosts.test_fleet import gauge
from tests.integration.hosts.test_hosts import running
from tests.integration.protocol.encrypted_harness import until

SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = Path("/sys/fs/cgroup/systemd")
ALONE = [
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount",
    "--mount-proc",
    "--cgroup",
    "--uts",
    "--ipc",
]
UNIT, HEAD = "offbeat-host@gpu7", "offbeat-head@run"
STUBS = ("sysinit", "basic", "shutdown", "network-online", "multi-user", "default", "proof")
"""Targets without content: nothing of the machine's own services may start in the namespaces."""


def why_not():
    """Return why no systemd can be started here, or ""."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    if not SYSTEMD.exists() or shutil.which("systemctl") is None:
        return "systemd is not installed (Debian: systemd)"
    if Path("/run/systemd/system").exists():
        return "a systemd runs on this machine, and the test would be in its way"
    return "" if CGROUPS.is_dir() else f"{CGROUPS} is not mounted"


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no systemd: {WHY_NOT}"),
]


class Systemd:
    """A systemd that knows these units and no others."""

    def __init__(self, folder, units):
        own, stubs = folder / "units", folder / "stubs"
        for each in (own, stubs, folder / "generators"):
            each.mkdir(parents=True)
        for name, text in units.items():
            (own / name).write_text(text)
        for name in STUBS:
            (stubs / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
        self._before = set(CGROUPS.iterdir())
        script = "\n".join(
            [
                "set -e",
                "mount --make-rshared /",
                "mount -t tmpfs tmpfs /run",
                f"mount --bind {shlex.quote(str(own))} /etc/systemd/system",
                f"mount --bind {shlex.quote(str(stubs))} /lib/systemd/system",
                f"mount --bind {folder}/generators /lib/systemd/system-generators",
                f"exec env -i PATH={os.environ['PATH']} container=test {SYSTEMD} --system --unit=proof.target",
            ]
        )
        with open(folder / "systemd.log", "wb") as log:
            self._process = subprocess.Popen([*ALONE, "sh", "-c", script], stdout=log, stderr=log)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._first = until(lambda: children.read_text().split(), "the namespaces are there", PATIENCE_S)[0]
        until(lambda: self("is-active", "proof.target") == "active", "systemd answers", PATIENCE_S)

    def __call__(self, *words):
        """Run systemctl, and return what it prints."""
        inside = ["nsenter", "-t", self._first, "-p", "-m", "systemctl", *words]
        return subprocess.run(inside, capture_output=True, text=True, timeout=200, check=False).stdout.strip()

    def said(self, unit):
        """Return what systemd knows of a unit's process."""
        text = self("show", unit, "-p", "ActiveState,ExecMainStatus,NRestarts,MainPID")
        return dict(line.split("=", 1) for line in text.splitlines())

    def close(self):
        self("stop", "offbeat-*")
        # All processes of the namespaces end with their first one.
        os.kill(int(self._first), signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        for made in set(CGROUPS.iterdir()) - self._before:
            if made.is_dir():
                for folder, _, _ in os.walk(made, topdown=False):
                    os.rmdir(folder)


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def systemd(fleet, tmp_path):
    folder = tmp_path / "gpu7"
    folder.mkdir()
    program = tmp_path / "offbeat"
    (tmp_path / "offbeat.py").write_text(OFFBEAT)
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT} OMP_NUM_THREADS=1 XDG_CACHE_HOME={folder}/cache COUNTING_PAUSE_S=0.2 "
        f'HOME={folder}\nexec {sys.executable} {tmp_path}/offbeat.py "$@" >>{folder}/host.log 2>&1\n'
    )
    program.chmod(0o755)
    site = Site(systemd=SystemdSite(folder=str(folder), program=str(program), grace_s=60))
    systemd = Systemd(tmp_path / "systemd", render(Job("run.toml", (), fleet.config), site, "systemd"))
    yield systemd
    systemd.close()


def carry(fleet, name):
    """Bring a ticket to the working folder of the units, and return the unit that it is for."""
    fleet.ticket("--host", name)
    (fleet.home / "tickets" / f"{name}.ticket").rename(fleet.home / "gpu7" / f"{name}.ticket")
    return f"offbeat-host@{name}"


def test_systemd_starts_a_host_again_after_a_fault_and_leaves_it_when_it_is_to_stay_away(fleet, systemd):
    def is_whole(name="gpu7"):
        found = fleet.status_of(name)
        return found and (found["generators"], found["actors"]) == (1, 2)

    assert carry(fleet, "gpu7") == UNIT
    log = fleet.home / "gpu7" / "host.log"
    assert systemd("start", UNIT) == ""
    until(is_whole, f"the host joins: {log.read_text() if log.exists() else ''}", PATIENCE_S)
    assert fleet.status_of("gpu7")["job"].startswith("systemd ")
    assert fleet.sampled_by("t0", "t1") == {"generator-gpu7-0"}

    # The supervisor is killed: systemd ends what it has left, and starts the host again.
    assert systemd("kill", "--signal=KILL", "--kill-who=main", UNIT) == ""
    until(lambda: systemd.said(UNIT)["NRestarts"] == "1", "systemd starts it again", PATIENCE_S)
    until(lambda: fleet.status_of("gpu7") is None, "the processes before are gone", PATIENCE_S)
    until(is_whole, "the host is back", PATIENCE_S)

    # Stopped, it drains in the middle of episodes, and stays away.
    lost = gauge(fleet, "leases_lost_total")
    names = [f"s{n}" for n in range(6)]
    fleet.put(*names)
    until(lambda: running(fleet, "actor-gpu7-0"), "episodes run", PATIENCE_S)
    assert systemd("stop", UNIT) == ""
    assert {s.status for unit in fleet.delivered(len(names)) for s in unit} == {"unfinished", "finished"}
    assert gauge(fleet, "leases_lost_total") == lost
    # A unit that has succeeded is forgotten, with its code.
    assert systemd.said(UNIT)["ActiveState"] == "inactive"
    assert "host ends with code 75" in log.read_text()

    # A revoked key ends it for good.
    assert systemd("start", UNIT) == ""
    until(is_whole, "the host is there again", PATIENCE_S)
    key_files.revoke(fleet.keys, "host-gpu7")
    until(lambda: systemd.said(UNIT)["ActiveState"] == "failed", "the host has ended", PATIENCE_S)
    found = systemd.said(UNIT)
    assert (found["ExecMainStatus"], found["NRestarts"]) == ("65", "0"), log.read_text()

    # When the run is over, a host ends, and nothing starts it again.
    unit = carry(fleet, "gpu8")
    assert systemd("start", unit) == ""
    until(lambda: is_whole("gpu8"), "another host joins", PATIENCE_S)
    fleet.learner.send(Goodbye(reason="all steps done", then="over"))
    until(lambda: systemd.said(unit)["ActiveState"] == "inactive", "it has ended", PATIENCE_S)
    found = systemd.said(unit)
    assert (found["ExecMainStatus"], found["NRestarts"]) == ("0", "0"), log.read_text()
    assert fleet.broker.process.wait(PATIENCE_S) == 0


@pytest.fixture
def head(tmp_path):
    """A run whose head and one host are units of a systemd."""
    program = tmp_path / "bin" / "offbeat"
    run = CountedRun(tmp_path, program, f"exec >>{tmp_path}/said.log 2>&1")
    site = Site(systemd=SystemdSite(folder=str(tmp_path), program=str(program), grace_s=30))
    systemd = Systemd(tmp_path / "systemd", render(Job("run.toml", (), run.config), site, "systemd"))
    yield run, systemd
    systemd.close()


def test_systemd_keeps_a_head_until_its_run_is_over(head, tmp_path):
    run, systemd = head

    def learner_starts(number):
        until(lambda: run.counted()["epoch"] == number, f"learner {number} begins", PATIENCE_S)
        # Units that were there already may suffice for steps.
        until(lambda: run.hosts() == {"gpu7"}, "its host is there", PATIENCE_S)
        run.go_on(3, PATIENCE_S)
        assert run.starts() == ["False", *["True"] * (number - 1)]

    assert systemd("start", HEAD) == ""
    until(run.status, "the broker answers", PATIENCE_S)
    assert main(["ticket", str(run.folder), "--host", "gpu7", "--out", str(tmp_path / "gpu7.ticket")]) == 0
    assert systemd("start", UNIT) == ""
    learner_starts(1)

    # The supervisor is killed: systemd ends what it has left, and the run goes on from its checkpoint.
    assert systemd("kill", "--signal=KILL", "--kill-who=main", HEAD) == ""
    until(lambda: systemd.said(HEAD)["NRestarts"] == "1", "systemd starts it again", PATIENCE_S)
    learner_starts(2)

    # Somebody else ends it: the learner writes a checkpoint, and systemd starts the head again.
    assert systemd("kill", "--signal=TERM", "--kill-who=main", HEAD) == ""
    until(lambda: systemd.said(HEAD)["NRestarts"] == "2", "systemd starts it again", PATIENCE_S)
    learner_starts(3)

    # Stopped, it stays away without a failure. It has sent its host away with 75, which comes back by itself.
    assert systemd("stop", HEAD) == ""
    assert systemd.said(HEAD)["ActiveState"] == "inactive"
    assert systemd("start", HEAD) == ""
    learner_starts(4)

    # Over, head and host end, and what a reboot does starts neither again.
    (run.folder / ENOUGH).touch()
    for unit in (HEAD, UNIT):
        until(lambda unit=unit: systemd.said(unit)["ActiveState"] == "inactive", f"{unit} ends", PATIENCE_S)
    assert (systemd.said(HEAD)["NRestarts"], systemd.said(UNIT)["NRestarts"]) == ("0", "0")
    assert systemd("start", HEAD) == ""
    assert systemd.said(HEAD)["ActiveState"] == "inactive"
    assert len(run.starts()) == 4
    print(run.prove(12))


STEPS = 30
RUN_FILE = f"""
extends = "spell_backward"
[run]
name = "run"
[model.tiny.warm_start]
steps = 40
demonstrations = 400
[generator]
count = 0
[actor]
count = 0
[learner]
steps = {STEPS}
checkpoint_every = 2
evaluation_tasks = 0
"""
LONG_S = 900.0
"""Longest wait for a learner or an engine that loads its libraries."""


def ports_in_a_row(count=3):
    while True:
        first = free_port()
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    made = held.enter_context(socket.socket())
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    made.bind(("127.0.0.1", port))
            except OSError:
                continue
        return first


@pytest.fixture
def trained(tmp_path):
    """A run of the recipe `spell_backward` and a systemd with the units of its head and its host: nothing counts."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    program = tmp_path / "offbeat"
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT} HOME={tmp_path} OFFBEAT_LOG_LEVEL=debug\n"
        f'exec {sys.executable} -m launch.cli "$@" >>{tmp_path}/said.log 2>&1\n'
    )
    program.chmod(0o755)
    own = SystemdSite(folder=str(tmp_path), program=str(program), address="127.0.0.1", port=ports_in_a_row())
    job = Job("run.toml", (), load(tmp_path / "run.toml", []))
    systemd = Systemd(tmp_path / "systemd", render(job, Site(systemd=own), "systemd"))
    yield tmp_path / "runs" / "run", systemd
    systemd.close()


def test_systemd_trains_a_model_through_the_death_of_its_head(trained, tmp_path):
    run, systemd = trained
    began = time.monotonic()

    def said():
        return (tmp_path / "said.log").read_text()[-4000:] if (tmp_path / "said.log").exists() else ""

    def wait(condition, what):
        def found():
            assert "failed" not in {systemd.said(unit)["ActiveState"] for unit in (HEAD, UNIT)}, said()
            return condition()

        until(found, f"{what}: {said()}", LONG_S)
        print(f"{what} after {time.monotonic() - began:.0f} s")

    def steps():
        """Return the numbers of the learner's steps, in the order in which it wrote them."""
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        return [line["step"] for line in map(json.loads, lines) if "learner/policy_version" in line]

    assert systemd("start", HEAD) == ""
    wait(lambda: "started broker" in said(), "the head starts")
    words = ["--host", "gpu7", "--address", "127.0.0.1", "--out", str(tmp_path / "gpu7.ticket")]
    # The model is in `runs/models` of the head's folder.
    with contextlib.chdir(tmp_path):
        assert main(["ticket", str(run), *words]) == 0
    assert systemd("start", UNIT) == ""
    wait(lambda: len(steps()) >= 3, "three steps are done")
    assert systemd("kill", "--signal=KILL", "--kill-who=main", HEAD) == ""
    before = max(steps())
    wait(lambda: systemd.said(HEAD)["NRestarts"] == "1", "systemd starts the head again")
    wait(lambda: max(steps()) > before, "the learner goes on")
    for unit in (HEAD, UNIT):
        wait(lambda unit=unit: systemd.said(unit)["ActiveState"] == "inactive", f"{unit} ends")
        assert systemd.said(unit)["ExecMainStatus"] == "0"
    assert set(steps()) == set(range(1, STEPS + 1))
    for path in run.glob("hosts/*/logs/actor*.log"):
        (run / "logs" / path.name).symlink_to(path)
    proof = prove(run)
    print(f"{len(steps())} lines of steps, {before} before the head was killed; {proof}")
    assert (proof.lost, proof.trained_twice) == ([], [])
