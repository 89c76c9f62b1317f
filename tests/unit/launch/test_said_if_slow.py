"""Test that the command line says what it does when that takes long, and only then."""

import sys
import threading

from launch.cli import said_if_slow


class Terminal:
    def __init__(self):
        self.lines, self.written = [], threading.Event()

    def write(self, text):
        self.lines.append(text)
        self.written.set()


def test_what_takes_long_is_said_while_it_goes_on(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with said_if_slow("looking", after_s=0.0):
        assert terminal.written.wait(60.0)
    assert terminal.lines == ["looking\n"]


def test_what_is_over_at_once_is_not_said(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with said_if_slow("looking", after_s=600.0):
        pass
    assert terminal.lines == []
