"""Weights & Biases. Settings of its own come from its environment variables, for example ``WANDB_MODE=offline``."""

from typing import Any, assert_never

from learner.trackers.sink import (
    SAMPLE_COLUMNS,
    WALL_TIME,
    Histograms,
    Record,
    Samples,
    Scalars,
    Summary,
    Text,
    TrackedRun,
    flat,
    sample_rows,
)


class WandbSink:
    """Writes records to a run of Weights & Biases; offline runs are in ``run_dir/wandb``.

    The x axis is the metric ``step``, and not the service's own counter, which refuses steps that a resumed run does
    again.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb: Any = wandb
        # Console and code of the learner are no business of a tracker.
        settings = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True)
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.identity(),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Write a record."""
        match record:
            case Scalars(step, at, values):
                self._log(step, at, dict(values))
            case Histograms(step, at, values):
                self._log(
                    step, at, {name: self._wandb.Histogram(of_name) for name, of_name in values.items()}
                )
            case Text(step, at, name, markdown):
                self._log(
                    step, at, {name: self._wandb.Table(columns=["step", "text"], data=[[step, markdown]])}
                )
            case Samples(step, at, samples):
                table = self._wandb.Table(
                    columns=list(SAMPLE_COLUMNS), data=sample_rows(samples), allow_mixed_types=True
                )
                self._log(step, at, {"samples": table})
            case Summary(_, _, values):
                self._run.summary.update({f"summary/{name}": value for name, value in flat(values)})
            case _:
                assert_never(record)

    def _log(self, step: int, at: float, values: dict[str, object]) -> None:
        self._run.log({"step": step, "_timestamp": at, WALL_TIME: at, **values})

    def rewind(self, step: int) -> None:
        """Do nothing: steps that are done again are shown beside the earlier ones."""

    def close(self, *, failed: bool) -> None:
        """Upload what is left, and end the run there."""
        self._run.finish(exit_code=1 if failed else 0)
