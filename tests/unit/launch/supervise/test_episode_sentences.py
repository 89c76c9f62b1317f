"""Test what the progress line, `offbeat status` and the table say about episodes."""

import io

import pytest
from rich.console import Console

from launch.supervise.broker_status import Answer
from launch.supervise.panel import Panel
from launch.supervise.progress import episodes_lines, trailer
from launch.supervise.summary import not_trained

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
