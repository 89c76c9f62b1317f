"""A real Slurm of four nodes runs the rendered jobs: it grows, shrinks, is preempted, is cancelled, and loses nodes."""

import os
import re
import subprocess
import sys
import time

import pytest

from launch.cli import main
from launch.fleet import render
from launch.fleet.job import Job
from launch.fleet.render import head_command
from launch.fleet.ticket import make_ticket, write_ticket
from tests.integration.hosts.counted_head import ENOUGH, CountedRun
from tests.integration.hosts.fleet_harness import OFFBEAT, Fleet
from tests.integration.hosts.hosts_harness import ROOT
from tests.integration.hosts.slurm_harness import Cluster, why_not
from tests.integration.hosts.test_fleet import gauge
from tests.integration.protocol.encrypted_harness import until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no Slurm: {WHY_NOT}"),
]
PATIENCE_S = 180.0
HEAD = """
import os, signal, sys, time
if sys.argv[1] == "train":
    # The broker and the learner are the test's, so this head says that it has begun, and waits.
    os.utime("runs/run/config.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(1)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path / "slurm")
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    yield cluster
    cluster.close()


@pytest.fixture
def fleet(tmp_path, monkeypatch, cluster):
    fleet = Fleet(tmp_path / "fleet")
    # The jobs run in a folder whose runs/run is the run folder.
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(fleet.run)
    program = tmp_path / "bin" / "offbeat"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{HEAD}{OFFBEAT}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield fleet
    fleet.close()


def hosts(fleet):
    """Return the hosts that are there, by name, with the seconds since they joined."""
    return {one["name"]: one["joined_s"] for one in fleet.broker.status()["hosts"]}


def generators(fleet):
    return [name for name in hosts(fleet) if name.startswith("g-")]


def await_generators(fleet, count):
    until(lambda: len(generators(fleet)) == count, f"{count} generators are there", PATIENCE_S)


def test_a_fleet_under_slurm(fleet, cluster, tmp_path, capfd):
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "run"\n[model]\npath = "{fleet.model}"\n[env]\nname = "{fleet.env}"\n'
    )
    (tmp_path / "site.toml").write_text(
        '[slurm]\npartition = "low"\nhead_partition = "high"\nactors_per_task = 1\ngrace_s = 25\nlargest = 5\n'
    )
    assert main(["launch", "run.toml", "--on", "slurm", "--site", "site.toml"]) == 0
    until(lambda: {"g-0", "a-0"} <= set(hosts(fleet)), "two tasks have joined", PATIENCE_S)
    assert fleet.sampled_by("t0", "t1") == {"generator-g-0-0"}
    (job,) = {one["job"].split("_")[0] for one in fleet.broker.status()["hosts"] if one["name"] == "g-0"}
    assert job.startswith("slurm ")

    # Up: the throttle of a running array.
    capfd.readouterr()
    assert main(["scale", "runs/run", "generators=3"]) == 0
    assert "Slurm starts 2" in capfd.readouterr().out
    await_generators(fleet, 3)

    # Down: the youngest drains, its task is complete and stays away. The two that came last may have come together.
    before = set(generators(fleet))
    eldest = max(before, key=hosts(fleet).get)
    assert main(["scale", "runs/run", "generators=2"]) == 0
    await_generators(fleet, 2)
    (gone,) = before - set(generators(fleet))
    assert gone != eldest
    name = "offbeat-run-generators"
    number = gone.removeprefix("g-")
    until(lambda: number not in cluster.tasks(name), "the task is complete", PATIENCE_S)

    # Preempted: the task drains within its grace, gives nothing up, and waits to come back.
    lost = gauge(fleet, "leases_lost_total")
    (head_node,) = {node for _, node in cluster.tasks("offbeat-run-head").values()}
    victims = {task: node for task, (state, node) in cluster.tasks(name).items() if state == "RUNNING"}
    task, node = next((task, node) for task, node in victims.items() if node)
    options = ["-p", "high", "-w", node, "--time=2", "-o", "/dev/null", "--wrap", "sleep 20"]
    options += ["-c", "3" if node == head_node else "4"]
    cluster.run("sbatch", *options)
    until(lambda: f"g-{task}" not in hosts(fleet), "the preempted host has left", PATIENCE_S)
    until(lambda: cluster.tasks(name).get(task, ("",))[0] == "PENDING", "it is requeued", PATIENCE_S)
    assert gauge(fleet, "leases_lost_total") == lost

    # Stopped: all jobs end, and none comes back.
    assert main(["launch", "--stop", "runs/run"]) == 0
    until(lambda: not hosts(fleet), "all hosts have left", PATIENCE_S)
    until(
        lambda: not cluster.run("squeue", "-h", "--name=offbeat-run-head," + name),
        "no job is left",
        PATIENCE_S,
    )


def test_tasks_that_start_before_their_head_are_queued_again_and_join_it(cluster, tmp_path, monkeypatch):
    """First without a ticket, then with one of an earlier start of the head.

    Slurm holds each requeued task back for two minutes. A start that is let go at once may meet the end of the last one
    on its node, and fails with code 1.
    """
    run = CountedRun(tmp_path, tmp_path / "bin" / "offbeat")
    impatient = tmp_path / "bin" / "offbeat.py"
    impatient.write_text("from launch.supervise import host\nhost.HEAD_S = 1.0\n" + impatient.read_text())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(render, "WAIT_TRIES", 1)
    monkeypatch.setattr(render, "REQUEUED_S", 5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.toml").write_text(
        '[slurm]\npartition = "low"\ngenerators = 1\nactors = 1\nactors_per_task = 1\ngrace_s = 10\nlargest = 1\n'
    )
    words = ["launch", "run.toml", "--on", "slurm", "--site", "site.toml", "--render", "runs/run.launch"]
    assert main(words) == 0
    roles = ("generators", "actors")
    arrays = {role: cluster.run("sbatch", "--parsable", f"runs/run.launch/{role}.sbatch") for role in roles}

    def starts(role):
        """Return how often the task of an array was requeued."""
        found = re.search(r"Restarts=(\d+)", cluster.run("scontrol", "show", "job", arrays[role]))
        return int(found[1]) if found else 0

    def log_of(role):
        return "".join(path.read_text() for path in (tmp_path / "runs/run.launch").glob(f"{role}-*.log"))

    for role in roles:
        until(lambda role=role: starts(role) >= 1, "a task without a ticket is requeued", PATIENCE_S)
        assert "the head has written no ticket yet" in log_of(role)
    # A head that was killed has left its tickets, and its next start is in the queue.
    first = subprocess.Popen(["offbeat", *head_command(Job("run.toml", (), run.config), 0)])
    try:
        until(run.status, "the broker answers", PATIENCE_S)
        for role in roles:
            write_ticket(make_ticket(run.folder, label=role[0]), tmp_path / f"{role}.ticket")
    finally:
        first.kill()
        first.wait(PATIENCE_S)
    until(lambda: run.status() is None, "its broker is gone", PATIENCE_S)
    for role in roles:
        (tmp_path / f"{role}.ticket").rename(tmp_path / "runs/run.launch/tickets" / f"{role}.ticket")
    for role in roles:
        until(
            lambda role=role: "starts look for it since" in log_of(role),
            "it finds no head",
            2 * PATIENCE_S,
        )
        until(lambda role=role: starts(role) >= 2, "it is requeued", PATIENCE_S)

    head = cluster.run("sbatch", "--parsable", "runs/run.launch/head.sbatch")
    until(lambda: run.hosts() == {"g-0", "a-0"}, "the tasks have joined the head", 2 * PATIENCE_S)
    run.go_on(3, PATIENCE_S)
    (run.folder / ENOUGH).touch()
    jobs = ",".join([head, *arrays.values()])
    until(lambda: not cluster.run("squeue", "-h", f"--jobs={jobs}"), "all jobs have ended", PATIENCE_S)
    assert {path.name for path in run.folder.parent.iterdir()} >= {"run", "run.launch"}
    assert not (run.folder.parent / "run-2").exists()
    assert not list((tmp_path / "runs/run.launch/tickets").glob("*.ticket"))


def test_the_nodes_of_a_host_and_of_the_head_die(cluster, tmp_path, monkeypatch):
    run = CountedRun(tmp_path, tmp_path / "bin" / "offbeat")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    # Each job has a node of its own.
    (tmp_path / "site.toml").write_text(
        '[slurm]\npartition = "low"\ngenerators = 1\nactors = 1\nactors_per_task = 1\ncpus = 3\nhead_cpus = 3\n'
        "grace_s = 10\nlargest = 1\n"
    )
    assert main(["launch", "run.toml", "--on", "slurm", "--site", "site.toml"]) == 0
    names = {role: f"offbeat-run-{role}" for role in ("head", "generators", "actors")}
    until(lambda: run.hosts() == {"g-0", "a-0"}, "two tasks have joined", PATIENCE_S)
    run.go_on(3, PATIENCE_S)

    def die(role):
        """Kill the node of a job, and let its next start be on another node at once. Return the seconds of all this."""
        ((task, (_, node)),) = cluster.tasks(names[role]).items()
        began = time.monotonic()
        cluster.kill_node(node)
        if role != "head":
            until(lambda: "g-0" not in run.hosts(), "the head notices", PATIENCE_S)
        noticed_s = time.monotonic() - began

        def state():
            return cluster.tasks(names[role]).get(task, ("gone", ""))

        until(lambda: state()[0] == "PENDING", "it is requeued", PATIENCE_S)
        requeued_s = time.monotonic() - began
        job = cluster.run("squeue", "-h", "-o", "%A", f"--name={names[role]}")
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        until(lambda: state()[0] == "RUNNING", "it runs again", PATIENCE_S)
        started = time.monotonic()
        assert state()[1] != node
        # Not earlier: Slurm's word to the dead node that this job has to end waits for it, and would end the new start.
        cluster.start_node(node)
        return noticed_s, requeued_s, started

    noticed_s, requeued_s, started = die("generators")
    until(lambda: run.hosts() == {"g-0", "a-0"}, "the host is back", PATIENCE_S)
    run.go_on(3, PATIENCE_S)
    print(
        f"a host's node died: noticed after {noticed_s:.1f} s, requeued after {requeued_s:.1f} s; steps again "
        f"{time.monotonic() - started:.1f} s after its next start"
    )

    _, requeued_s, started = die("head")
    until(lambda: run.counted()["epoch"] == 2, "the learner goes on", PATIENCE_S)
    learner_s = time.monotonic() - started
    run.go_on(3, PATIENCE_S)
    print(
        f"the head's node died: requeued after {requeued_s:.1f} s; learner {learner_s:.1f} s, and three steps "
        f"{time.monotonic() - started:.1f} s after its next start"
    )
    assert run.starts() == ["False", "True"], "the second start resumes"
    until(lambda: run.hosts() == {"g-0", "a-0"}, "hosts have waited for the head", PATIENCE_S)

    (run.folder / ENOUGH).touch()
    until(
        lambda: not cluster.run("squeue", "-h", "--name=" + ",".join(names.values())),
        "all jobs have ended",
        PATIENCE_S,
    )
    print(run.prove(9))
