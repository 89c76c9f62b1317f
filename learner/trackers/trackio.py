"""Trackio: a database on this host, or a Space or server of ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL``."""

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


class TrackioSink:
    """Writes records to a run of Trackio, which knows runs of a project by their names."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        # Its own samplers of processor and GPU would be a second source beside `offbeat status`.
        self._run: Any = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.identity()[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: Record) -> None:
        """Write a record."""
        match record:
            case Scalars(step, at, values):
                self._run.log({WALL_TIME: at, **values}, step=step)
            case Histograms(step, _, values):
                self._run.log({name: self._trackio.Histogram(v) for name, v in values.items()}, step=step)
            case Text(step, _, name, markdown):
                self._run.log({name: self._trackio.Markdown(markdown)}, step=step)
            case Samples(step, _, samples):
                table = self._trackio.Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(samples))
                self._run.log({"samples": table}, step=step)
            case Summary(step, _, values):
                numbers = {n: float(v) for n, v in flat(values) if isinstance(v, int | float)}
                self._run.log({f"summary/{name}": value for name, value in numbers.items()}, step=step)
            case _:
                assert_never(record)

    def rewind(self, step: int) -> None:
        """Do nothing: steps that are done again are shown beside the earlier ones."""

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()
