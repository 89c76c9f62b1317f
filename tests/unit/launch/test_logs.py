"""No text of others can forge a line of a log."""

import logging

from launch.logs import OneRecord, plain


def test_text_of_others_is_neither_another_line_nor_a_command_to_a_terminal():
    said = "bad\n2026-01-01 00:00:00 INFO broker: all is well\x1b[2J\r\x07"
    record = logging.LogRecord("n", logging.ERROR, "", 0, "peer said %s", (said,), None)
    lines = OneRecord("%(levelname)s %(message)s").format(record).splitlines()
    assert lines == ["ERROR peer said bad", "    2026-01-01 00:00:00 INFO broker: all is well?[2J??"]


def test_a_traceback_keeps_its_lines():
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord(
            "n", logging.ERROR, "", 0, "m", (), (type(error), error, error.__traceback__)
        )
    text = OneRecord("%(message)s").format(record)
    assert text.splitlines()[:2] == ["m", "Traceback (most recent call last):"]


def test_what_is_printed_on_a_terminal_is_plain():
    assert plain("a\tb\nü") == "a?b\nü"
