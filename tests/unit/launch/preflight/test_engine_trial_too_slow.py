"""`offbeat check` of a model that vLLM does not come to an end with."""

import importlib.util
import subprocess

from launch.preflight import engine_trial
from launch.run_file.load import check


def test_a_trial_that_does_not_end_is_a_remark(monkeypatch, tmp_path):
    def stuck(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", stuck)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    config = check({"model": {"path": "some/model"}, "env": {"name": "calculator"}}, "run.toml")
    (said,) = engine_trial.try_engine(config, tmp_path)
    assert (
        said == "whether vLLM can load the model could not be tried: it did not come to an end within 300 s"
    )
