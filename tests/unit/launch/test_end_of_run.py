"""The weights server, which is no peer of the broker, finds in the run folder that the run is over."""

import json

import pytest

from launch.errors import FAILED, FINAL, leave_note
from launch.servers import EndOfRun


def result(folder, then):
    # A new file, as each learner writes one: the old one is replaced.
    (folder / "new").write_text(json.dumps({"ended_by": "x", "run": then}))
    (folder / "new").replace(folder / "result.json")


@pytest.mark.parametrize(("then", "over"), [("over", True), ("resumed", False)])
def test_a_result_says_whether_the_run_is_over(tmp_path, then, over):
    end = EndOfRun(tmp_path)
    assert not end.has_come()
    result(tmp_path, then)
    assert end.has_come() is over
    result(tmp_path, "over")
    assert end.has_come()


@pytest.mark.parametrize(("code", "over"), [(FINAL, True), (FAILED, False)])
def test_an_error_ends_the_run_if_it_is_final(tmp_path, code, over):
    end = EndOfRun(tmp_path)
    leave_note(tmp_path, "learner", code, "nothing arrived")
    assert end.has_come() is over


def test_what_an_earlier_learner_left_does_not_count(tmp_path):
    result(tmp_path, "over")
    leave_note(tmp_path, "learner", FINAL, "diverged")
    end = EndOfRun(tmp_path)
    assert not end.has_come()
    (tmp_path / "learner.exit").unlink()
    assert not end.has_come()
    result(tmp_path, "over")
    assert end.has_come()


def test_a_result_that_cannot_be_read_is_no_end(tmp_path):
    end = EndOfRun(tmp_path)
    (tmp_path / "result.json").write_text("{")
    assert not end.has_come()
