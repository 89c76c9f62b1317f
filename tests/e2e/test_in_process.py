"""All roles in one process, with a real engine: docs/extend/debugging.md as it stands, and keys at the debugger."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, PageRun, blocks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PAGE = ROOT / "docs" / "extend" / "debugging.md"
TRAIN = "offbeat train letters.toml --in-process"


def block_with(text):
    (found,) = [block for block in blocks(PAGE) if text in block.text and "cProfile" not in block.text]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the files of the page, its commands before the training included."""
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.chdir(folder)
    run = PageRun(folder)
    for block in blocks(PAGE):
        if TRAIN in block.text:
            run.command(block, ["python", "make_rows.py"], fails=False)
            break
        run.run(block)
    run.close()
    return folder


def offbeat(folder, line, keys=""):
    """Run a command line of the page with these keys on its standard input. Return the process that has ended."""
    words = [sys.executable, "-m", "launch.cli", *line.split()[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=folder, env=env, input=keys, capture_output=True, text=True, timeout=400, check=False
    )


def test_a_person_stops_in_a_reward_and_at_each_door_of_a_segment(folder):
    (folder / ".pdbrc").write_text(block_with("# .pdbrc").text)
    keys = [
        "where", "p missed, answer", "import sys; sys.breakpointhook = print",
        "c", "c", "c", "c", "c", "p self.logp_current.shape == self.tokens.advantage.shape", "c", "c",
    ]  # fmt: skip
    done = offbeat(folder, TRAIN, "".join(f"{key}\n" for key in keys))
    assert done.returncode == 0, done.stdout + done.stderr
    # One stack has the learner's step and the user's line.
    stack = done.stdout.partition("(Pdb)")[2].partition("(Pdb)")[0]
    assert "learner/trainer.py" in stack
    assert "rewards.py(5)five_letters()" in stack
    doors = ["uplink.py", "dispatch.py", "intake.py", "engine.py", "objective.py"]
    places = [re.search(rf"^> .*/{door}\(", done.stdout, re.MULTILINE).start() for door in doors]
    assert places == sorted(places)
    assert "(Pdb) True" in done.stdout
    summary = json.loads((folder / "runs" / "letters" / "summary.json").read_text())
    assert (summary["steps"], summary["episodes"]["failed"]) == (2, 0)
    lines = map(json.loads, (folder / "runs" / "letters" / "metrics.jsonl").read_text().splitlines())
    print(
        f"seconds of a step: {summary['training_seconds'] / 2:.2f}", [m["step"] for m in lines if "step" in m]
    )


def test_what_one_process_trained_is_read_like_any_run(folder, monkeypatch, capsys):
    reward = (folder / "rewards.py").read_text()
    (folder / "rewards.py").write_text(reward.replace("    breakpoint()\n", ""))
    assert offbeat(folder, TRAIN).returncode == 0
    steps = [
        m["learner/step_seconds"]
        for m in map(json.loads, (folder / "runs" / "letters" / "metrics.jsonl").read_text().splitlines())
        if "learner/step_seconds" in m
    ]
    assert len(steps) == 2
    assert max(steps) < 200
    assert "prompt" in offbeat(folder, "offbeat samples runs/letters -n 1").stdout
    assert "whole" in offbeat(folder, "offbeat journal verify runs/letters").stdout
    assert "bit for bit" in offbeat(folder, "offbeat retrain runs/letters").stdout
    exec(compile(block_with("RecordedBatches").text, "debugging.md", "exec"), {})
    told = capsys.readouterr().out
    assert told.count("(") >= 8


def test_an_error_of_a_reward_reaches_the_terminal_with_its_line_and_quitting_ends_the_run(folder):
    reward = (folder / "rewards.py").read_text()
    # The trial before the run calls the function a few times.
    failing = (
        reward.replace("    breakpoint()\n", "    calls.append(1)\n    assert len(calls) != 15, row\n")
        + "calls = []\n"
    )
    (folder / "rewards.py").write_text(failing)
    done = offbeat(folder, f"{TRAIN} --journal memory run.name=failing")
    assert done.returncode == 0, done.stderr
    assert 'rewards.py", line 5, in five_letters' in done.stderr
    assert not (folder / "runs" / "failing" / "journal").exists()
    (folder / "rewards.py").write_text(reward)
    done = offbeat(folder, f"{TRAIN} run.name=quit", "q\n")
    assert done.returncode == 130
    assert "interrupted" in done.stderr


OWN_FORMULA = """import torch
from learner.formulas import Section
from learner.update.objective import SurrogateValue, View


class Nothing(Section):
    pass


def plain(view: View, settings: Nothing) -> SurrogateValue:
    value = view.ratio("behaviour") * view.advantage
    breakpoint()
    return SurrogateValue(value, torch.zeros_like(value, dtype=torch.bool))
"""


def test_a_person_stops_in_a_formula_and_ends_the_run_there(folder):
    (folder / "rewards.py").write_text((folder / "rewards.py").read_text().replace("    breakpoint()\n", ""))
    (folder / "my_loss.py").write_text(OWN_FORMULA)
    own = "learner.algorithm.corrections=[] learner.algorithm.surrogate.kind=my_loss.py:plain"
    done = offbeat(folder, f"{TRAIN} {own}", "p value.shape == view.advantage.shape\nc\nwhere\nq\n")
    assert done.returncode == 130, done.stdout + done.stderr
    assert "(Pdb) True" in done.stdout
    assert done.stdout.count("my_loss.py(13)plain()") >= 2
    assert "learner/update/engine.py" in done.stdout
    assert "interrupted" in done.stderr


def test_the_command_for_one_test_runs_in_the_checkout():
    words = block_with("-k lease").text.split()[1:]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_run_that_cannot_be_in_one_process_is_refused_before_anything_starts(folder):
    done = offbeat(folder, f"{TRAIN} learner.processes=2")
    assert done.returncode == 65
    assert "add learner.processes=1" in done.stderr
    assert not Path(folder / "runs").exists()


@pytest.mark.parametrize(("share", "trains"), [(1.0, False), (0.5, True)])
def test_given_conversations_are_learnt_alone_and_beside_sampled_ones(tmp_path, share, trains):
    """The solutions of the tiny job's own tasks; `offbeat retrain` gets the same weights from them."""
    given = f"run.name=given learner.steps=2 learner.given.share={share} learner.evaluation_tasks=4"
    done = offbeat(tmp_path, f"offbeat train spell_backward --in-process {given}")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "given" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["tokens_given"] > 0
    assert bool(summary["tokens_trained"]) == trains
    lines = map(json.loads, (tmp_path / "runs" / "given" / "metrics.jsonl").read_text().splitlines())
    losses = [line["learner/given_loss_nats"] for line in lines if "learner/given_loss_nats" in line]
    assert len(losses) == 2
    if trains:
        assert "bit for bit" in offbeat(tmp_path, "offbeat retrain runs/given").stdout
