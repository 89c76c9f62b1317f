"""What a run shows in the terminal and in its picture: the start, episodes, samples under an evaluation, curves."""

import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from launch.run_file.load import check
from launch.supervise import summary
from launch.supervise.broker_status import Answer
from launch.supervise.panel import PLAIN_STILL_S, Panel, evaluation_samples, fit, sample_lines
from launch.supervise.progress import episodes_lines, trailer
from launch.supervise.summary import draw_curve, not_trained
from launch.supervise.supervisor import Starting, keep_starts, last_starts
from learner.samples import SAMPLES_FILE, Sample, SamplePart, encode_line

WAITS = ["everybody waits for a learner: none has joined"]


def test_the_seconds_of_the_last_start_are_kept_for_the_next(tmp_path):
    assert last_starts(tmp_path) == {}
    keep_starts(tmp_path, {"learner": 68.0, "generator": 40.0})
    assert last_starts(tmp_path) == {"learner": 68.0, "generator": 40.0}
    (tmp_path / ".start-seconds.json").write_text("[1]")
    assert last_starts(tmp_path) == {}
    keep_starts(tmp_path / "nowhere", {"learner": 1.0})


def test_each_role_counts_its_slowest_process_and_joins_once():
    starting = Starting(["broker", "weights", "actor-0", "actor-1"], {})
    assert starting.look(["actor-1"], {"actor-0": 3.0, "actor-1": 3.0}) == ["actor-1 has joined after 3 s"]
    assert starting.text.startswith("actor-0 3 s (")
    assert starting.look(["actor-0", "actor-1"], {"actor-0": 9.0}) == ["actor-0 has joined after 9 s"]
    assert starting.look(["actor-0"], {"actor-0": 1.0}) == []
    assert starting.took == {"actor": 9.0}


def test_plain_lines_are_rare_while_processes_start_and_do_not_repeat_the_wait(tmp_path, monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr("launch.supervise.panel.time.monotonic", lambda: clock[0])
    config = check({"model": {"path": "a/b"}, "env": {"name": "calculator"}}, "run.toml")
    panel = Panel()
    panel.heard(Answer(0.0, {"waits": WAITS}))
    for _ in range(90):
        clock[0] += 1.0
        panel.update(tmp_path, config, restarts={}, starting="learner 12 s (imports DeepSpeed)")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 90 / PLAIN_STILL_S + 1
    assert lines[0].endswith("starting the roles, 1 s | learner 12 s (imports DeepSpeed)")


ROW = {"kind": "KeyError", "message": "'answer'", "place": "my_task.py:23", "fault": True, "count": 32}
EPISODES = {
    "ended": 64, "failed": 34, "recent": 64, "recent_failed": 34,
    "why": "KeyError: 'answer' in my_task.py:23 (and 1 more kind)",
    "failures": [ROW, {"kind": "", "message": "reward is None", "place": "", "fault": True, "count": 2}],
    "interrupted": 3, "interrupted_why": "no generator",
}  # fmt: skip


def test_the_progress_line_says_at_once_what_fails():
    answer = Answer(0.0, {"waits": [], "episodes": EPISODES})
    assert trailer({}, answer, 0.0) == (
        " | failed 53 %: KeyError: 'answer' in my_task.py:23 (and 1 more kind)"
    )


@pytest.mark.parametrize("episodes", [{}, EPISODES | {"recent_failed": 0}])
def test_a_run_without_failures_has_the_line_of_before(episodes):
    assert trailer({}, Answer(0.0, {"waits": [], "episodes": episodes}), 0.0) == ""


def test_an_error_with_marks_of_the_terminal_does_not_end_the_run(tmp_path, monkeypatch):
    panel = Panel()
    panel._console = Console(file=io.StringIO(), force_terminal=True)
    panel._status = panel._console.status("starting")
    panel.heard(Answer(0.0, {"waits": [], "episodes": EPISODES | {"why": "[/bold] [nothing"}}))
    from launch.run_file.load import check

    config = check({"model": {"path": "m"}, "env": {"name": "calculator"}}, "doc")
    panel._printed = -1e9
    panel.update(tmp_path, config, restarts={})
    panel.close()


def test_the_status_page_lists_each_kind_with_its_count():
    assert episodes_lines(EPISODES) == [
        "episodes 64 ended, 34 failed, 53 % of the last 64",
        "  32 failed: KeyError: 'answer' in my_task.py:23",
        "  2 failed: reward is None",
        "  3 interrupted, and run again: no generator",
    ]
    assert episodes_lines({}) == []
    assert episodes_lines(EPISODES | {"failed": 0, "failures": [], "interrupted": 0}) == [
        "episodes 64 ended, 0 failed"
    ]


def test_the_table_says_what_was_not_trained():
    assert not_trained({}, 10) == "none"
    assert not_trained({"uniform": 1_056, "evaluated": 256, "recommitted": 9}, 96) == "uniform 92 %"


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


def test_the_first_group_is_shown_once_while_no_step_comes(tmp_path, capsys):
    panel = Panel()
    panel._tell_news(tmp_path)
    assert capsys.readouterr().out == ""
    row = sample(step=0, chosen="first", answer="five", end="finished: stop")
    (tmp_path / SAMPLES_FILE).write_bytes(encode_line(row))
    panel._tell_news(tmp_path)
    panel._tell_news(tmp_path)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == ["first group: return 0, finished: stop", "2 + 2 = -> five"]
    # A run that goes on after steps has shown them.
    (tmp_path / SAMPLES_FILE).write_bytes(encode_line(row) + encode_line(sample(step=3)))
    Panel()._tell_news(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_failed_episode_is_shown_first():
    rows = [sample(evaluation="before", return_=value) for value in (0.0, 1.0)]
    rows.append(sample(evaluation="before", failed=True, failure="KeyError: 'x'"))
    shown = evaluation_samples(rows, 10)
    assert [(s.failed, s.return_) for s in shown] == [(True, 0.0), (False, 0.0)]
    assert sample_lines(shown[0], 100)[0] == "held-out: failed: KeyError: 'x'"


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDate<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        "<bos><|turn>user\n{}<turn|>\n<|turn>model\n",
        "<s>[INST] Earlier [/INST] so</s>[INST] {} [/INST]",
        "<｜begin▁of▁sentence｜>You are kind.<｜User｜>{}<｜Assistant｜><think>\n",
        "<|start|>system<|message|>You are.<|end|><|start|>user<|message|>{}<|end|><|start|>assistant",
        "[gMASK]<sop><|user|>\n{}<|assistant|>\n<think></think>\n",
        "<bos><user>Earlier<assistant>so<eos><user>{}<assistant>",
        "<|im_start|>user\nAn example<|im_end|>\n [900 characters left out] {}<|im_end|>\n<|im_start|>assistant\n",
        "{}",
    ],
)
def test_the_line_has_the_question_and_not_the_marks_of_the_template(prompt):
    for question in ("What is 13 + 92?", "Is a < b in <b>HTML</b>?"):
        asked = sample(prompt.format(question), "105<|im_end|>")
        assert sample_lines(asked, 100)[1] == f"  {question} -> 105<|im_end|>"


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


BEFORE = {"step": 0, "accuracy": 0.25, "return_mean": 0.5, "answered": 8, "tasks": 8}


def test_a_curve_without_points_has_no_legend(tmp_path):
    draw_curve([], [], tmp_path / "curve.png", title="run")
    assert (tmp_path / "curve.png").stat().st_size


def test_the_picture_names_its_bars_and_shows_lines_that_lie_on_each_other(tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)
    lines = [{"step": i, "rollout/return_mean": i / 4, "rollout/correct_share": i / 4} for i in range(4)]
    draw_curve(lines, [BEFORE], tmp_path / "curve.png", title="run")
    figure = plt.gcf()
    monkeypatch.undo()
    top, styles = figure.axes[0], {}
    for line in top.get_lines():
        styles[line.get_label()] = line.get_linestyle()
    assert top.get_title("left") == "run: means over 20 steps, single steps faint; bars: one standard error"
    assert (styles["return, sampled"], styles["solved, sampled"]) == ("-", "--")
    plt.close(figure)


def test_every_set_has_a_name_a_colour_and_a_marker(tmp_path, monkeypatch):
    drawn, held_out = [], summary._held_out
    monkeypatch.setattr(summary, "_held_out", lambda *parts: drawn.append(held_out(*parts)) or drawn[-1])
    sets = [BEFORE, BEFORE | {"set": "hard"}, BEFORE | {"set": "lost", "accuracy": None, "return_mean": None}]
    draw_curve([], sets, tmp_path / "curve.png", title="run")
    assert drawn == [
        [(0.25, "held-out solved, greedy", "black")],
        [(0.25, "hard: solved", "tab:purple")],
        [],
    ]
