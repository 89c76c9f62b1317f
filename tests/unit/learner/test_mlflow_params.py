"""Test that a start of MLflow that failed half way is completed by the next."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from learner.trackers.mlflow import MlflowSink


class Server:
    """Keeps one run; its first batches fail."""

    def __init__(self, fail):
        self.params, self.fail, self.made = {}, fail, 0
        self.run = SimpleNamespace(info=SimpleNamespace(run_id="r"), data=SimpleNamespace(params=self.params))

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *_, **__):
        return [self.run] if self.made else []

    def create_run(self, *_, **__):
        self.made += 1
        return self.run

    def update_run(self, *_, **__): ...

    def get_run(self, _):
        return self.run

    def log_dict(self, *_): ...

    def log_batch(self, _, params):
        if self.fail:
            self.fail -= 1
            raise ConnectionError("away")
        assert not {p[0] for p in params} & set(self.params)
        self.params.update(params)


def test_a_retry_logs_the_parameters_that_the_first_try_did_not(tmp_path, monkeypatch):
    server = Server(fail=1)
    package = ModuleType("mlflow")
    package.MlflowClient = lambda **_: server
    package.entities = SimpleNamespace(Param=lambda key, value: (key, value))
    monkeypatch.setitem(sys.modules, "mlflow", package)
    run = SimpleNamespace(folder=tmp_path, project="p", name="n", config={"a": 1}, identity=lambda: "i")
    with pytest.raises(ConnectionError):
        MlflowSink(run)
    MlflowSink(run)
    MlflowSink(run)
    assert server.made == 1
    assert server.params == {"a": "1"}
