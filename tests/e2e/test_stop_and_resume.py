"""Ctrl-C stops all roles and leaves a checkpoint; `--resume` continues from it."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.process_tree import await_gone, descendants

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


def test_interrupt_then_resume_with_two_ranks(train_command, root, tmp_path):
    folder = tmp_path / "run"
    command = train_command("spell_backward", *SETTINGS, "learner.processes=2")
    first = start(command, root)
    await_step(folder, 3, first)
    family = descendants(first.pid)
    assert len(family) >= 6, "broker, learner, generator and its engine, two actors"
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 0, output
    assert await_gone(family) == set()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ended_by"] == "Ctrl-C"
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
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    kept = [(sample["step"], sample["task"]) for sample in samples]
    assert len(kept) == len(set(kept)) > 0
    assert max(step for step, _ in kept) <= steps[-1]
