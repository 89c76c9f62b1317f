"""Test what `offbeat train` shows of the metrics file while a learner writes it, and of evaluations at the end."""

import io
import json
import os

import pytest
from rich.console import Console

from launch.run_file.load import check
from launch.supervise.panel import Panel
from launch.supervise.progress import MEAN, SMOOTHED_STEPS, MetricsTail, progress_line
from launch.supervise.summary import draw_curve, held_out_rows
from protocol.files import write_whole

CONFIG = check({"model": {"path": "m"}, "env": {"name": "calculator"}}, "doc")


def step(number, reward=0.5, **more):
    return {"step": number, "learner/policy_version": number, "rollout/return_mean": reward, **more}


def evaluation(number, accuracy=None, return_mean=0.5, not_run=0):
    line = {"step": number, "evaluation/answered_tasks": 64.0, "evaluation/failed_tasks": 0.0}
    line |= {"evaluation/not_run_tasks": float(not_run)}
    line |= {} if accuracy is None else {"evaluation/accuracy": accuracy}
    return line | ({} if return_mean is None else {"evaluation/return_mean": return_mean})


def text(*lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, *lines):
    with open(path, "a") as file:
        file.write(text(*lines))


def test_each_evaluation_is_returned_once_however_many_steps_follow(path):
    tail = MetricsTail()
    assert tail.read(path) == []
    assert tail.values == {}
    append(path, evaluation(0, 0.25))
    assert [e["evaluation/accuracy"] for e in tail.read(path)] == [0.25]
    # More lines than any end of the file that could be read instead.
    append(path, evaluation(10, 1.0), *[step(n, padding="x" * 1_000) for n in range(11, 100)])
    assert [e["step"] for e in tail.read(path)] == [10]
    assert tail.read(path) == []
    assert tail.values["evaluation/accuracy"] == 1.0
    assert tail.values["evaluation_step"] == 10
    assert tail.values["step"] == 99


def test_a_line_that_is_half_written_is_read_when_it_is_whole(path):
    tail = MetricsTail()
    whole = text(evaluation(10, 1.0))
    path.write_text(whole[:20])
    assert tail.read(path) == []
    with open(path, "a") as file:
        file.write(whole[20:])
    assert len(tail.read(path)) == 1


def test_a_learner_that_goes_back_replaces_the_file_and_nothing_is_returned_twice(path):
    tail = MetricsTail()
    append(path, evaluation(0, 0.25), *[step(n, 1.0) for n in range(1, 30)])
    tail.read(path)
    write_whole(path, text(evaluation(0, 0.25), *[step(n, 0.0) for n in range(1, 11)]))
    assert tail.read(path) == []
    assert (tail.values["step"], tail.values[MEAN + "rollout/return_mean"]) == (10, 0.0)
    append(path, evaluation(10, 0.5), evaluation(10, 0.75))
    assert [e["evaluation/accuracy"] for e in tail.read(path)] == [0.5, 0.75]


def test_lines_of_the_run_before_a_resume_are_not_shown(path):
    append(path, evaluation(0, 0.25), step(1))
    os.utime(path, (1_000, 1_000))
    tail = MetricsTail(since=2_000.0)
    assert tail.read(path) == []
    assert tail.values == {}
    append(path, step(2))
    assert tail.read(path) == []
    assert tail.values["step"] == 2


def test_the_reward_in_the_line_is_a_moving_mean(path):
    tail = MetricsTail()
    append(path, *[step(n, reward) for n, reward in enumerate([9.0] + [0.5, 1.0] * (SMOOTHED_STEPS // 2))])
    tail.read(path)
    assert " reward 0.750 | lag" in progress_line(tail.values, CONFIG, 10.0)
    assert "right" not in progress_line(tail.values, CONFIG, 10.0)
    append(path, step(99, 0.75, **{"rollout/correct_share": 0.25}))
    tail.read(path)
    assert "right 0.25" in progress_line(tail.values, CONFIG, 10.0)


def test_the_line_has_the_last_evaluation(path):
    tail = MetricsTail()
    append(path, evaluation(0, 0.25))
    tail.read(path)
    assert progress_line(tail.values, CONFIG, 9.0) == (
        "starting the roles, 9 s | held-out accuracy 0.25, return 0.50 at step 0"
    )
    append(path, step(10), evaluation(10, return_mean=0.75), step(11))
    tail.read(path)
    assert "| held-out return 0.75 at step 10 |" in progress_line(tail.values, CONFIG, 9.0)
    append(path, evaluation(12, return_mean=None, not_run=9))
    tail.read(path)
    assert "held-out" not in progress_line(tail.values, CONFIG, 9.0)


def test_an_evaluation_during_training_gets_a_line_that_stays(tmp_path, path):
    panel, output = Panel(), io.StringIO()
    panel._console = Console(file=output, soft_wrap=True)
    append(path, step(10), evaluation(10, 1.0), step(11))
    os.utime(path, (2**31, 2**31))
    panel.update(tmp_path, CONFIG, restarts={})
    panel.update(tmp_path, CONFIG, restarts={})
    said = output.getvalue()
    assert said.count("evaluation at step 10: held-out accuracy 1.000, return 0.500 (64 tasks answered)") == 1
    assert "step 11/100" in said


ENTRY = {"tag": "before", "step": 0, "tasks": 64, "answered": 64, "failed": 0, "not_run": 0, "why": ""}


def test_the_table_shows_the_last_evaluation_even_if_the_run_was_interrupted():
    first = ENTRY | {"accuracy": 0.0, "return_mean": 0.1}
    last = ENTRY | {"tag": "step 430", "step": 430, "accuracy": 1.0, "return_mean": 0.9}
    assert held_out_rows([first, last | {"step": 10}, last]) == [
        ("held-out accuracy", "0.000 at step 0, 1.000 at step 430 (greedy)"),
        ("held-out return", "0.100 at step 0, 0.900 at step 430 (greedy)"),
    ]


def test_a_run_without_evaluations_has_no_row():
    assert held_out_rows([]) == []


def test_an_evaluation_without_a_result_is_missing_and_its_row_says_why():
    first = ENTRY | {"accuracy": None, "return_mean": 0.1}
    lost = {"answered": 60, "not_run": 4, "why": "no generator", "accuracy": None, "return_mean": None}
    assert held_out_rows([first, ENTRY | lost | {"step": 9}]) == [
        ("held-out return", "0.100 at step 0, missing at step 9 (greedy)"),
        ("held-out tasks at step 9", "60 of 64 answered, 4 never run: no generator"),
    ]


def test_evaluations_of_a_checkpoint_of_before_are_shown_too():
    old = {
        "tag": "before",
        "step": 0,
        "policy_version": 0,
        "tasks": 64,
        "accuracy": 0.5,
        "return_mean": 0.5,
        "failed": 3,
    }
    assert held_out_rows([old])[0] == ("held-out accuracy", "0.500 at step 0 (greedy)")


@pytest.mark.parametrize("accuracy", [None, 0.5])
def test_the_curve_is_drawn_with_and_without_right_answers(tmp_path, accuracy):
    lines = [step(n) for n in range(1, 5)]
    evaluations = [
        ENTRY | {"accuracy": accuracy, "return_mean": 0.5},
        ENTRY | {"accuracy": None, "return_mean": None},
    ]
    draw_curve(lines, evaluations, tmp_path / "curve.png", title="t")
    assert (tmp_path / "curve.png").stat().st_size > 1_000


def test_a_run_that_an_earlier_version_began_is_shown(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 40, "evaluation/accuracy": 0.45, "evaluation/return_mean": 0.66}\n')
    tail = MetricsTail()
    tail.read(path)
    config = check({"model": {"path": "m"}, "env": {"name": "calculator"}}, "doc")
    assert (
        progress_line(tail.values, config, 3.0)
        == "starting the roles, 3 s | held-out accuracy 0.45, return 0.66"
    )
