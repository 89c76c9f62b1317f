"""Ctrl-C stops everything with a checkpoint; --resume goes on; kill -9 of the supervisor leaves no orphan."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

SETTINGS = ("learner.steps=1000", "learner.evaluation_tasks=0")


def start(command, root):
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def await_step(folder: Path, step: int, process: subprocess.Popen, deadline_s: float = 300.0) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        if path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines()):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached in {deadline_s} s")


def descendants(pid: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def alive(pids: set[int]) -> set[int]:
    running = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                running.add(pid)
        except OSError:
            continue
    return running


def await_gone(pids: set[int], deadline_s: float = 30.0) -> set[int]:
    deadline = time.monotonic() + deadline_s
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupt_then_resume(train_command, root, tmp_path, processes):
    folder = tmp_path / "run"
    command = train_command("spell_backward", *SETTINGS, f"learner.processes={processes}")
    first = start(command, root)
    await_step(folder, 3, first)
    family = descendants(first.pid)
    assert len(family) >= 6, "broker, learner, generator and its engine, two actors"
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 0, output
    assert await_gone(family) == set()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ended_by"] == "SIGTERM"
    reached = summary["steps"]

    second = start([*command, "--resume"], root)
    try:
        await_step(folder, reached + 2, second)
    finally:
        second.send_signal(signal.SIGINT)
        output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), "no step was done twice and none left out"


def test_killed_supervisor_leaves_no_orphan(train_command, root, tmp_path):
    process = start(train_command("spell_backward", *SETTINGS), root)
    try:
        await_step(tmp_path / "run", 1, process)
        family = descendants(process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert await_gone(family) == set()
