"""What holds for all unit tests."""

import sys
from types import SimpleNamespace

import pytest

TRIAL = "launch.preflight.engine_trial"


@pytest.fixture(autouse=True)
def no_engine_is_tried(monkeypatch):
    """Keep `offbeat check` from asking vLLM whether it can load a model. Models here are made up.

    tests/integration/launch/test_engine_trial.py has the trial.
    """
    monkeypatch.setitem(sys.modules, TRIAL, SimpleNamespace(try_engine=lambda config, folder: []))
