"""MLflow: the server of ``MLFLOW_TRACKING_URI``, or a database in the run folder."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, assert_never

from learner.trackers.sink import (
    SAMPLE_COLUMNS,
    Histograms,
    Record,
    Samples,
    Scalars,
    Summary,
    Text,
    TrackedRun,
    bins_of,
    flat,
    sample_rows,
)

DATABASE = "mlflow.db"
"""File in the run folder, where no server is named."""
IDENTITY = "offbeat.run"
"""Tag by which a resumed run finds itself."""
MAX_METRICS, MAX_PARAMS = 1_000, 100
"""Most metrics and parameters of one message, bounds of MLflow's interface."""
MAX_VALUE = 500
"""Most characters of a parameter. The file ``config.json`` at the run has the whole."""


class MlflowSink:
    """Writes records to a run of MLflow.

    Histograms and tables are files of the run, because MLflow has no such metrics.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient, entities

        self._entities: Any = entities
        where = os.environ.get("MLFLOW_TRACKING_URI", "")
        here = "" if where else str(run.folder.resolve() / "mlflow")
        self._client: Any = MlflowClient(tracking_uri=where or f"sqlite:///{run.folder.resolve() / DATABASE}")
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            self._client.create_experiment(run.project, artifact_location=here or None)
            if experiment is None
            else experiment.experiment_id
        )
        self._id = self._found(number, run) or self._made(number, run)
        self._log_params(run)
        self._client.log_dict(self._id, dict(run.config), "config.json")

    def _found(self, experiment: str, run: TrackedRun) -> str:
        runs = self._client.search_runs(
            [experiment], filter_string=f"tags.`{IDENTITY}` = '{run.identity()}'", max_results=1
        )
        if not runs:
            return ""
        found: str = runs[0].info.run_id
        self._client.update_run(found, status="RUNNING")
        return found

    def _made(self, experiment: str, run: TrackedRun) -> str:
        made: str = self._client.create_run(
            experiment, run_name=run.name, tags={IDENTITY: run.identity()}
        ).info.run_id
        return made

    def _log_params(self, run: TrackedRun) -> None:
        # A parameter is written once: those of a run found are kept, and those a failed start left out are added.
        known = self._client.get_run(self._id).data.params
        params = [
            self._entities.Param(_key(name), str(value)[:MAX_VALUE])
            for name, value in flat(run.config)
            if _key(name) not in known
        ]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def write(self, record: Record) -> None:
        """Write a record."""
        match record:
            case Scalars(step, at, values):
                metrics = [
                    self._entities.Metric(_key(name), float(v), round(at * 1000), step)
                    for name, v in values.items()
                ]
                for start in range(0, len(metrics), MAX_METRICS):
                    self._client.log_batch(self._id, metrics=metrics[start : start + MAX_METRICS])
            case Histograms(step, _, values):
                binned = {
                    name: dict(zip(("counts", "edges"), bins_of(v), strict=True))
                    for name, v in values.items()
                }
                self._client.log_dict(self._id, binned, f"histograms/step-{step:06d}.json")
            case Text(step, at, name, markdown):
                self._client.log_text(self._id, markdown, f"{name}/step-{step:06d}-{round(at * 1000)}.md")
            case Samples(step, at, samples):
                # The form of MLflow's own tables, without the package pandas, which writing one otherwise needs.
                table = {"columns": list(SAMPLE_COLUMNS), "data": sample_rows(samples)}
                self._client.log_dict(self._id, table, f"samples/step-{step:06d}-{round(at * 1000)}.json")
            case Summary(_, _, values):
                self._client.log_dict(self._id, dict(values), "summary.json")
                tags = [
                    self._entities.RunTag(f"summary.{name}", str(value)[:MAX_VALUE])
                    for name, value in _shown(values)
                ]
                self._client.log_batch(self._id, tags=tags[:MAX_PARAMS])
            case _:
                assert_never(record)

    def rewind(self, step: int) -> None:
        """Do nothing: steps that are done again are shown beside the earlier ones."""

    def close(self, *, failed: bool) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


def _key(name: str) -> str:
    """Return a name that MLflow takes: it refuses other characters than these."""
    return re.sub(r"[^\w.\-/ :]", "_", name)[:250]


def _shown(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((_key(name), value) for name, value in flat(values) if not isinstance(value, list))
