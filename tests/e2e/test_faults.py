"""A real run survives the kill or stop of any role. If the supervisor dies, `--resume` continues the run."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from launch.processes import families
from learner.run_files import weights_folder
from tests.e2e.process_tree import await_gone, descendants

pytestmark = pytest.mark.timeout(900)

SETTINGS = (
    "learner.steps=1000",
    "learner.evaluation_tasks=0",
    "learner.checkpoint_every=2",
    "run.max_minutes=20",
)
FOUND_S = 60.0
"""Most seconds until a process that stands still has a successor; a machine that does nothing else needs 10. The delays
of restarts in a row are among them."""


class Running:
    """A process of `offbeat train` in the test's folder."""

    def __init__(self, command, root, folder: Path):
        self.folder = folder
        with open(folder.parent / "train.log", "ab") as log:
            self.process = subprocess.Popen(command, cwd=root, stdout=log, stderr=subprocess.STDOUT)

    def until(self, condition, deadline_s=240.0):
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    @property
    def output(self):
        return (self.folder.parent / "train.log").read_text()

    def pid(self, name):
        return json.loads((self.folder / "supervisor.json").read_text())["processes"][name]["pid"]

    def metrics(self):
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [m for m in map(json.loads, lines) if "learner/policy_version" in m]

    def steps(self):
        return [m["step"] for m in self.metrics()]

    def goes_on(self, count=2):
        """Wait until ``count`` more steps are done."""
        reached = max(self.steps(), default=0)
        self.until(lambda: max(self.steps(), default=0) >= reached + count)

    def replaced(self, name, number, pid=None):
        """Signal a process, or its descendant ``pid``. Return the seconds until its replacement."""
        before, began = self.pid(name), time.monotonic()
        os.kill(pid or before, number)
        self.until(lambda: self.pid(name) != before)
        return time.monotonic() - began

    def end(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(120) == 0, self.output
        return json.loads((self.folder / "summary.json").read_text())

    def kill(self):
        self.process.kill()
        self.process.wait(30)


def engine_of(generator: int) -> int:
    """Return the id of the process in which vLLM computes."""
    return busiest(generator, ())


def busiest(head: int, known) -> int:
    """Return the descendant that used the most processor time, leaving out those in ``known``."""
    family = families([head])[head]
    return max((pid for pid in family if pid not in (head, *known)), key=lambda pid: family[pid].cpu_s)


EVERYBODY = ("broker", "actor-0", "learner", "generator-0"), ("actor-1", "generator-0", "learner", "broker")
# With every change the test below and `test_ten_faults` kill each role.
FEW = (), ("actor-1", "learner")


@pytest.mark.parametrize(
    ("killed", "stopped"), [pytest.param(*EVERYBODY, marks=pytest.mark.soak), FEW], ids=["everybody", "few"]
)
def test_a_run_goes_on_whoever_is_killed_or_stopped(train_command, root, tmp_path, killed, stopped):
    run = Running(train_command("spell_backward", *SETTINGS), root, tmp_path / "run")
    try:
        run.goes_on(3)
        for name in killed:
            assert run.replaced(name, signal.SIGKILL) < FOUND_S
            run.goes_on()
        for name in stopped:
            assert run.replaced(name, signal.SIGSTOP) < FOUND_S
            run.goes_on()
        seconds = run.replaced("generator-0", signal.SIGSTOP, engine_of(run.pid("generator-0")))
        assert seconds < FOUND_S
        run.goes_on()
        summary = run.end()
    finally:
        run.kill()
    restarts = Counter(name.partition("-")[0] for name in (*killed, *stopped, "generator-0"))
    none = dict.fromkeys(summary["restarts"], 0)
    assert summary["restarts"] == none | restarts, summary["restart_reasons"]
    assert run.steps() == list(range(1, summary["steps"] + 1)), "each step is there once"


def test_whoever_is_killed_nobody_waits_for_the_dead_on_a_shared_gpu(train_command, root, tmp_path):
    """vLLM gives no memory back on a CPU, so this tests who waits for whom."""
    lockstep = ("run.mode=sync", "generator.sleep_in_updates=true", "generator.count=2")
    run = Running(train_command("spell_backward", *SETTINGS, *lockstep), root, tmp_path / "run")
    try:
        run.goes_on(2)
        for name in ("generator-0", "learner"):
            run.replaced(name, signal.SIGKILL)
            run.goes_on()
        summary = run.end()
    finally:
        run.kill()
    ended = {"broker": 0, "learner": 1, "generator": 1, "actor": 0}
    assert summary["restarts"] == ended, summary["restart_reasons"]
    assert run.steps() == list(range(1, summary["steps"] + 1)), "each step is there once"
    last = run.metrics()[-1]
    assert last["generator/asleep_seconds_total"] > 0
    assert last["learner/gpu_wait_seconds"] < 60
    assert last["learner/policy_lag_max_versions"] == 0


def test_a_rank_that_is_killed_takes_its_learner_along_and_all_ranks_come_back(train_command, root, tmp_path):
    command = train_command("spell_backward", *SETTINGS, "learner.processes=2")
    run = Running(command, root, tmp_path / "run")
    try:
        run.goes_on(3)
        torchrun = run.pid("learner")
        other = busiest(torchrun, [int((run.folder / "learner.pid").read_text())])
        assert run.replaced("learner", signal.SIGKILL, other) < 150.0
        run.goes_on()
        summary = run.end()
    finally:
        run.kill()
    assert summary["restarts"]["learner"] == 1
    assert run.steps() == list(range(1, summary["steps"] + 1))


def test_a_killed_supervisor_costs_a_resume_and_leaves_no_process_and_no_shared_memory(
    train_command, root, tmp_path
):
    command = train_command("spell_backward", *SETTINGS)
    run = Running(command, root, tmp_path / "run")
    run.goes_on(3)
    family = descendants(run.process.pid)
    run.kill()
    assert await_gone(family) == set()
    left = weights_folder(run.folder)
    assert left.is_dir(), "nobody was there to remove it"
    resumed = Running([*command, "--resume"], root, tmp_path / "run")
    try:
        resumed.goes_on()
        summary = resumed.end()
    finally:
        resumed.kill()
    assert f"removed {left}" in resumed.output
    assert resumed.steps() == list(range(1, summary["steps"] + 1))
    assert not left.exists()
