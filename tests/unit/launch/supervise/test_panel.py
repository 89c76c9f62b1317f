"""Test when the panel prints: a line that changes on a terminal, elsewhere a line if it says something new."""

import io
import json
import os

import pytest
from rich.console import Console

from launch.run_file.load import check
from launch.supervise.broker_status import Answer
from launch.supervise.panel import HEADER, PLAIN_STILL_S, Panel
from launch.supervise.progress import progress_line
from launch.supervise.supervisor import Starting

CONFIG = check(
    {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": {"steps": 20, "evaluation_tasks": 64}},
    "doc",
)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("launch.supervise.panel.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch):
    """A panel on a terminal, and what it has printed."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, soft_wrap=True, highlight=False)
    monkeypatch.setattr("launch.supervise.panel.Console", lambda **_: console)
    panel = Panel()
    # The live line is drawn by a thread of rich; only its text is of interest.
    panel._status.stop()
    return panel, output


def reported(folder, *lines):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    os.utime(folder / "metrics.jsonl", (2**31, 2**31))


def step(number):
    return {
        "step": number,
        "learner/policy_version": number,
        "rollout/return_mean": 0.5,
        "generator/tokens_per_second": 70.0,
    }


def said(capsys):
    return [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]


def test_a_plain_line_is_not_repeated_while_no_step_ends(tmp_path, clock, capsys):
    panel = Panel()
    reported(tmp_path, step(3))
    for _ in range(int(PLAIN_STILL_S)):
        clock[0] += 1.0
        panel.update(tmp_path, CONFIG, restarts={})
    lines = said(capsys)
    assert [line[:9] for line in lines] == [HEADER[:9], "step 3/20"]
    reported(tmp_path, step(4))
    clock[0] += 5.0
    panel.update(tmp_path, CONFIG, restarts={})
    assert [line[:9] for line in said(capsys)] == ["step 4/20"]


def test_the_last_evaluation_is_named_and_has_no_figures_of_a_time_that_is_over(tmp_path, clock, capsys):
    panel = Panel()
    reported(tmp_path, step(20))
    for _ in range(20):
        clock[0] += 1.0
        panel.update(tmp_path, CONFIG, restarts={})
    panel.update(tmp_path, CONFIG, restarts={}, last=True)
    line = "step 20/20 v20 | reward 0.500 | lag 0.0 (max 0) | last evaluation"
    assert said(capsys) == [HEADER, line]
    values = {**step(20), "evaluation_step": 20, "evaluation/accuracy": 0.5}
    assert progress_line(values, CONFIG, 9.0).endswith(
        "| held-out accuracy 0.50 at step 20 | lag 0.0 (max 0)"
    )


def test_an_evaluation_between_steps_is_named(tmp_path, clock, capsys):
    panel = Panel()
    reported(tmp_path, step(3))
    learner = {"role": "learner", "gauges": {"waiting_seconds": 2.0}}
    panel.heard(Answer(0.0, {"peers": [learner], "waits": []}))
    panel.update(tmp_path, CONFIG, restarts={})
    assert said(capsys)[-1] == "step 3/20 v3 | reward 0.500 | lag 0.0 (max 0) | evaluation"
    learner["gauges"]["units_wanted"] = 4.0
    clock[0] += 60.0
    panel.update(tmp_path, CONFIG, restarts={})
    assert "70 tok/s sampled" in said(capsys)[-1]


def test_the_window_of_the_mean_is_said_once(tmp_path, clock, capsys):
    panel = Panel()
    for number in (1, 2, 3):
        reported(tmp_path, step(number))
        clock[0] += 6.0
        panel.update(tmp_path, CONFIG, restarts={})
    assert sum("means over the last 20 steps" in line for line in said(capsys)) == 1


def test_on_a_terminal_the_start_is_one_line_and_leaves_one_behind(terminal):
    panel, output = terminal
    starting = Starting(["learner", "actor-0"], {"learner": 30.0})
    output.truncate(0)
    panel.joined(starting.look(["actor-0"], {"actor-0": 3.0, "learner": 3.0}), starting.done)
    assert "joined" not in output.getvalue()
    panel.joined(starting.look(["actor-0", "learner"], {"actor-0": 9.0, "learner": 9.0}), starting.done)
    panel.joined(starting.look(["actor-0", "learner"], {}), starting.done)
    assert output.getvalue().count("all roles have joined: actor after 3 s, learner after 9 s") == 1


def test_elsewhere_each_process_that_joins_has_a_line(capsys):
    panel = Panel()
    starting = Starting(["learner", "actor-0"], {})
    panel.joined(starting.look(["actor-0"], {"actor-0": 3.0}), starting.done)
    panel.joined(starting.look(["actor-0", "learner"], {"learner": 9.0}), starting.done)
    assert said(capsys) == ["actor-0 has joined after 3 s", "learner has joined after 9 s"]


def test_a_stage_changes_in_the_live_line(terminal):
    panel, _ = terminal
    panel.stage("model: making it", 2.0)
    assert str(panel._status.status) == "model: making it, 2 s"


def test_a_stage_is_said_once_where_there_is_no_live_line(capsys):
    panel = Panel()
    panel.stage("model: making it", 0.0)
    panel.stage("model: making it", 1.0)
    assert said(capsys) == ["model: making it"]


def test_the_start_says_how_long_a_role_usually_takes():
    starting = Starting(["generator-0", "learner"], {"learner": 30.0})
    assert "usually 15 to 90 s" in starting.text
    assert "learner 0 s (imports DeepSpeed, loads the model; last time 30 s)" in starting.text


def test_supervised_training_has_a_loss_and_no_reward():
    values = {"step": 3, "learner/policy_version": 3, "learner/given_loss_nats": 1.25}
    line = progress_line(values, CONFIG, 9.0)
    assert line.startswith("step 3/20 v3 | given 1.250 nats | ")
    assert "nan" not in line
    assert "reward" not in line
