"""Test the samples under an evaluation in the terminal."""

import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from launch.run_file.load import check
from launch.supervise.panel import Panel, evaluation_samples, fit, sample_lines
from learner.samples import SAMPLES_FILE, Sample, SamplePart, encode_line

CONFIG = check({"model": {"path": "m"}, "env": {"name": "calculator"}}, "doc")


def sample(prompt="2 + 2 =", answer="4", *, step=10, evaluation="", **changes):
    values = {
        "step": step,
        "policy_version": step,
        "split": "heldout" if evaluation else "train",
        "env": "e",
        "task": "1g1.0",
        "group": "1g1",
        "evaluation": evaluation,
        "parts": [SamplePart("prompt", prompt, 4), SamplePart("answer", answer, 2)],
    }
    return Sample(**(values | changes))


def test_an_evaluation_shows_its_worst_its_best_and_an_answer_that_was_trained():
    rows = [
        sample(step=9, advantage=0.5, answer="trained"),
        *[sample(evaluation="step 10", answer=str(value), return_=value) for value in (0.5, 1.0, 0.0, 0.7)],
        sample(step=20, evaluation="step 20", answer="later"),
    ]
    assert [s.parts[1].text for s in evaluation_samples(rows, 10)] == ["0.0", "1.0", "trained"]
    assert [s.parts[1].text for s in evaluation_samples(rows[1:2], 10)] == ["0.5"]
    assert evaluation_samples([], 10) == []


def test_a_failed_episode_is_shown_first():
    rows = [sample(evaluation="before", return_=value) for value in (0.0, 1.0)]
    rows.append(sample(evaluation="before", failed=True, failure="KeyError: 'x'"))
    shown = evaluation_samples(rows, 10)
    assert [(s.failed, s.return_) for s in shown] == [(True, 0.0), (False, 0.0)]
    assert sample_lines(shown[0], 100)[0] == "held-out: failed: KeyError: 'x'"


@pytest.mark.parametrize("text", ["x" * 500, "漢字" * 200, "\x1b[2J" * 90, "\U0001f600" * 300])
@pytest.mark.parametrize("width", [20, 70, 150])
def test_lines_are_cut_to_the_terminal(text, width):
    for line in sample_lines(sample(text, text, rewards={"r" * 50: 1.0}), width):
        assert cell_len(line) <= width + 8
        assert line.isprintable()
    assert cell_len(fit(text.replace("\x1b", ""), width)) <= width


def test_the_panel_prints_them_under_the_line_of_the_evaluation(tmp_path):
    panel, output = Panel(), io.StringIO()
    panel._console = Console(file=output, soft_wrap=True)
    metrics = {"step": 10, "evaluation/answered_tasks": 64.0, "evaluation/accuracy": 0.5}
    (tmp_path / SAMPLES_FILE).write_bytes(
        encode_line(sample(answer="5\x1b[2J[bold] :bomb:", evaluation="step 10"))
    )
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(metrics) + "\n")
    panel._tail._since = 0.0
    panel.update(tmp_path, CONFIG, restarts={})
    lines = output.getvalue().splitlines()
    at = next(i for i, line in enumerate(lines) if "evaluation at step 10" in line)
    assert lines[at + 1].strip().startswith("held-out: return 0")
    assert lines[at + 2].strip() == "2 + 2 = -> 5\\x1b[2J[bold] :bomb:"
