"""A head that dies before its learner begins serves in the same folder when it is started again by its script.

A host that was away when this run ended comes to an end, too.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from launch import run_folder
from launch.commands.status import alive
from launch.fleet.job import Job
from launch.fleet.render import render
from launch.fleet.site import Site, SshSite
from launch.fleet.ticket import make_ticket, write_ticket
from learner.run_files import says_over
from tests.integration.hosts.counted_head import ENOUGH, NOT_YET, CountedRun
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT
from tests.integration.protocol.encrypted_harness import until


@pytest.fixture
def run(tmp_path):
    return CountedRun(tmp_path, tmp_path / "bin" / "offbeat", f"exec >>{tmp_path}/said.log 2>&1")


@pytest.fixture
def start(run):
    """Start the rendered script of a head."""
    script = run.home / "head.sh"
    # The second start of a host without a head is the last one.
    job = Job("run.toml", ("fleet.no_head_hours=1e-6",), run.config)
    script.write_text(render(job, Site(ssh=SshSite()), "ssh")["head.sh"])
    heads = []

    def started():
        path = {"PATH": f"{run.home}/bin:{os.environ['PATH']}"}
        heads.append(subprocess.Popen(["bash", str(script)], cwd=run.home, env=os.environ | path))
        return heads[-1]

    yield started
    for head in heads:
        if head.poll() is None:
            head.kill()
        head.wait(PATIENCE_S)


IMPATIENT = """
import sys
from launch.supervise import host
host.HEAD_S = 0.1
from launch.cli import main
sys.exit(main(sys.argv[1:]))
"""


def host_of(ticket, folder):
    """Run a host in a folder until it ends. Return its exit code, and what it has said."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-c", IMPATIENT, "host", "--ticket", str(ticket)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.returncode, done.stdout + done.stderr


def learner_of(run):
    """Return the process of the learner; 0 while there is none."""
    record = run.folder / "supervisor.json"
    processes = json.loads(record.read_text())["processes"] if record.exists() else {}
    return processes.get("learner", {}).get("pid", 0)


def folders(runs):
    """Return the names of the run folders; a file beside them has the seconds of a start that all roles saw through."""
    return {path.name for path in runs.iterdir() if path.is_dir()}


KILLED = """
import os, signal, sys
from launch import run_folder
from tests.integration.hosts.counted_head import train
run_folder.claim = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
train(sys.argv[1:])
"""


@pytest.mark.timeout(600)
def test_a_head_that_dies_before_it_has_the_lock_is_started_again_in_its_empty_folder(run, start):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [
        sys.executable,
        "-c",
        KILLED,
        "train",
        str(run.file),
        "generator.count=0",
        "actor.count=0",
        "--again",
    ]
    killed = subprocess.run(words, cwd=run.home, env=environment, timeout=PATIENCE_S, check=False)
    assert (killed.returncode, list(run.folder.iterdir())) == (-signal.SIGKILL, [])

    # Another process has the folder for a while, as the lock of a dead machine would.
    said = run.home / "said.log"
    with run_folder.claim(run.folder):
        head = start()
        waits = "waiting 120 s at most: runs/run is in use by a run that has not ended (process"
        until(lambda: said.exists() and waits in said.read_text(), "the head waits for the lock", PATIENCE_S)
    until((run.folder / "epoch").exists, "a learner begins in the folder", PATIENCE_S)
    assert folders(run.folder.parent) == {"run"}
    (run.folder / ENOUGH).touch()
    head.wait(PATIENCE_S)
    assert says_over(run.folder), said.read_text()


@pytest.mark.timeout(600)
def test_a_head_that_dies_before_its_learner_begins_is_started_again_in_its_folder(run, start):
    runs, said = run.folder.parent, run.home / "said.log"
    runs.mkdir()
    (runs / NOT_YET).touch()
    first = start()
    until(run.status, "the broker answers", PATIENCE_S)
    learner = until(lambda: learner_of(run), "the learner is started", PATIENCE_S)
    ticket = make_ticket(run.folder, host="gpu7")
    first.kill()
    first.wait(PATIENCE_S)
    until(lambda: not alive(learner), "its learner is gone", PATIENCE_S)
    until(lambda: run.status() is None, "its broker is gone", PATIENCE_S)

    (runs / NOT_YET).unlink()
    second = start()
    until((run.folder / "epoch").exists, "a learner begins in the folder of the first start", PATIENCE_S)
    assert folders(runs) == {"run"}
    assert make_ticket(run.folder, host="gpu7").keys == ticket.keys, "tickets of the first start stay valid"
    aside = run.folder / "failed-start-1"
    assert (aside / "logs" / "broker.log").stat().st_size
    assert f"its logs and files are in {aside.relative_to(run.home)}" in said.read_text()

    # From now on a start resumes.
    second.kill()
    second.wait(PATIENCE_S)
    until(lambda: run.status() is None, "its broker is gone", PATIENCE_S)
    third = start()
    until(lambda: run.counted()["epoch"] == 2, "its learner begins again", PATIENCE_S)
    (run.folder / ENOUGH).touch()
    third.wait(PATIENCE_S)
    assert says_over(run.folder), said.read_text()
    assert folders(runs) == {"run"}
    assert run.starts() == ["False", "False", "True"]

    # A host that was away: on a machine with the run folder, and on two starts elsewhere.
    path = run.home / "gpu7.ticket"
    write_ticket(ticket, path)
    code, said = host_of(path, run.home)
    assert (code, "says that the run is over" in said) == (0, True), said
    code, said = host_of(path, run.home / "gpu7")
    assert (code, "starts look for it since" in said) == (75, True), said
    code, said = host_of(path, run.home / "gpu7")
    assert (code, "longer than fleet.no_head_hours" in said) == (65, True), said
