"""The program that runs a job in every way has a case for each shipped method, which its run file can supply."""

import pytest

from benchmarks.every_way.cases import SHORT, method_cases
from launch.run_file.load import load
from launch.run_file.shipped import METHODS, run_files
from learner.credit.needs import needed_marks, needed_rewards

CASES = method_cases()


def test_every_method_has_a_case():
    assert set(CASES) == set(run_files(METHODS))


@pytest.mark.parametrize("name", CASES)
def test_the_run_file_of_a_case_takes_its_settings_and_gives_what_the_method_needs(name):
    case = CASES[name]
    config = load(run_files()[case.run_file or "smollm2"], [*SHORT, *case.overrides, "learner.steps=2"])
    given = {"calculator": {"step", "answer"}, "reasoning_gym": {"score"}}[config.env.name]
    marks = {"calculator": {"anchor", "calls", "call"}, "reasoning_gym": set()}[config.env.name]
    assert {name for _, name in needed_rewards(config.learner)} <= given
    assert {name for _, name in needed_marks(config.learner)} <= marks
