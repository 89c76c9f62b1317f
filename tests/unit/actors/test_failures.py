"""Test what an exception of an environment becomes: a failure that can be counted, and one traceback in the log."""

import json
import logging
from pathlib import Path

import pytest

from actors.errors import ActorError, EnvironmentFailed, GenerationFailed
from actors.failures import FailureLog, failure_of, place_of
from protocol.failures import MAX_KINDS, FailureCounts, describe
from protocol.messages.episodes import Failure

HERE = Path(__file__).relative_to(Path.cwd())


def reward(task):
    return float(task["answer"])


def raised(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def lines_of(function):
    first = function.__code__.co_firstlineno
    return first + 1


def test_a_failure_names_the_class_the_text_and_the_line_of_the_environment():
    failure = failure_of(raised(lambda: reward({})))
    assert describe(failure) == f"KeyError: 'answer' in {HERE}:{lines_of(reward)}"
    assert failure.fault


def test_the_line_is_the_environments_even_if_a_library_raised():
    def parse():
        return json.loads("{")

    assert place_of(raised(parse)) == f"{HERE}:{lines_of(parse)}"


def test_an_error_of_an_environment_stands_for_its_cause(caplog):
    def wrapped():
        try:
            reward({})
        except KeyError as error:
            raise EnvironmentFailed("step failed") from error

    assert describe(failure_of(raised(wrapped))) == f"KeyError: 'answer' in {HERE}:{lines_of(reward)}"
    with caplog.at_level(logging.WARNING):
        FailureLog().record(raised(wrapped), "1g0.0.0")
    assert caplog.text.count("Traceback (most recent call last)") == 1


def test_an_error_of_the_actor_says_everything_in_its_text():
    text = "environment: reward 'r' is None, not a number"
    assert failure_of(ActorError(text)) == Failure(message=text)
    assert not failure_of(GenerationFailed("no generator")).fault


def test_texts_are_bounded_on_one_line_and_need_not_be_printable():
    class Rude(Exception):
        def __str__(self):
            raise ValueError

    assert failure_of(Rude()).message == "its text cannot be shown"
    failure = failure_of(ValueError("a\nb\x1b[2J" + "c" * 5_000))
    assert len(failure.message) == 1_000
    shown = describe(failure)
    assert shown.startswith("ValueError: a b?[2Jc")
    assert len(shown) < 300


def test_the_log_has_one_traceback_for_each_distinct_error_and_counts_the_others(caplog):
    failures = FailureLog()
    with caplog.at_level(logging.WARNING):
        for number in range(150):
            failures.record(raised(lambda: reward({})), f"1g{number}.0.0")
            failures.record(raised(lambda: reward({"answer": "x"})), f"1g{number}.1.0")
    tracebacks = [r for r in caplog.records if r.exc_info]
    assert [r.exc_info[0] for r in tracebacks] == [KeyError, ValueError]
    assert "reward" in caplog.text
    counted = [r.getMessage() for r in caplog.records if not r.exc_info]
    assert [text.split()[0] for text in counted] == ["10", "10", "100", "100"]


def test_the_number_of_distinct_errors_in_the_log_is_bounded(caplog):
    failures = FailureLog()
    with caplog.at_level(logging.WARNING):
        for number in range(10 * MAX_KINDS):
            failures.record(ActorError("reward is " + "x" * number), "1g0.0.0")
    assert len(caplog.records) == MAX_KINDS + 1
    assert "others are not logged" in caplog.records[-1].getMessage()


def test_counts_keep_what_is_most_frequent_first_and_stay_bounded():
    counts = FailureCounts()
    for number in range(100):
        counts.add(Failure(kind="ValueError", message=str(number), place="t.py:1"))
        counts.add(Failure(message="reward is " + "x" * number))
    assert counts.total == 200
    assert len(counts.rows()) == MAX_KINDS
    assert counts.sentence() == f"ValueError: 0 in t.py:1 (and {MAX_KINDS - 1} more kinds)"
    again = FailureCounts.from_rows(counts.total, json.loads(json.dumps(counts.rows())))
    assert again.rows() == counts.rows()


@pytest.mark.parametrize("text", ["[/bold]", "100 %s"])
def test_a_sentence_keeps_marks_that_other_formats_read(text):
    assert text in describe(Failure(message=text))


def test_messages_that_differ_in_numbers_or_the_trajectory_are_one_kind():
    failures = FailureLog()
    for number in range(100):
        text = f"environment: step of 1g{number}.0.0 took longer than env_timeout_s = 30 s"
        failures.record(EnvironmentFailed(text), f"1g{number}.0.0")
        failures.record(ActorError(f"first prompt of {number} tokens leaves no room"), f"1g{number}.0.0")
    kinds = list(failures._counts.most_frequent())
    assert [count for _, count in kinds] == [100, 100]
    assert kinds[0][0].message == "environment: step took longer than env_timeout_s = 30 s"
