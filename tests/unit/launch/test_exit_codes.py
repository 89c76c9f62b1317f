"""Exit codes say whether another start could help."""

import importlib

import pytest

from launch import exit_codes
from launch.errors import ConfigError
from protocol.errors import LinkDown


@pytest.mark.parametrize("name", sorted(exit_codes.FINAL_ERRORS))
def test_every_final_error_exists(name):
    module, _, kind = name.rpartition(".")
    if module in ("learner.checkpoint",):
        pytest.importorskip("torch")
    assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def test_an_error_below_a_final_one_is_final_too():
    class Narrow(ConfigError):
        pass

    assert exit_codes.exit_code(Narrow("x")) == exit_codes.FINAL
    assert exit_codes.exit_code(LinkDown("x")) == exit_codes.FAILED


def test_a_note_lives_until_the_next_start(tmp_path):
    assert exit_codes.read_note(tmp_path, "learner") is None
    exit_codes.leave_note(tmp_path, "learner", exit_codes.FINAL)
    assert exit_codes.read_note(tmp_path, "learner") == exit_codes.FINAL
    exit_codes.clear_note(tmp_path, "learner")
    exit_codes.clear_note(tmp_path, "learner")
    assert exit_codes.read_note(tmp_path, "learner") is None
