"""SwanLab. Settings of its own come from its environment variables, for example ``SWANLAB_MODE=offline``."""

import json
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
    bins_of,
    sample_rows,
)


class SwanlabSink:
    """Writes records to an experiment of SwanLab; offline experiments are in ``run_dir/swanlog``."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        # The learner's console is no business of a tracker.
        swanlab.merge_settings({"terminal": {"proxy_type": "none"}})
        self._run: Any = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.identity(),
            resume="allow",
            log_dir=str(run.folder / "swanlog"),
            config=dict(run.config),
        )

    def write(self, record: Record) -> None:
        """Write a record."""
        match record:
            case Scalars(step, at, values):
                self._run.log({WALL_TIME: at, **values}, step=step)
            case Histograms(step, _, values):
                self._run.log(
                    {name: self._bars(*bins_of(of_name)) for name, of_name in values.items()}, step=step
                )
            case Text(step, _, name, markdown):
                self._run.log({name: self._swanlab.Text(markdown)}, step=step)
            case Samples(step, _, samples):
                rows = [["" if cell is None else str(cell) for cell in row] for row in sample_rows(samples)]
                table = self._swanlab.echarts.Table()
                table.add(list(SAMPLE_COLUMNS), rows)
                self._run.log({"samples": table}, step=step)
            case Summary(step, _, values):
                self._run.log({"summary": self._swanlab.Text(json.dumps(values, indent=1))}, step=step)
            case _:
                assert_never(record)

    def rewind(self, step: int) -> None:
        """Do nothing: SwanLab keeps what it has of a step."""

    def close(self, *, failed: bool) -> None:
        """Upload what is left, and end the experiment there."""
        if failed:
            self._swanlab.finish(
                "crashed", error="the learner ended with an error; its log is in the run folder"
            )
        else:
            self._swanlab.finish()

    def _bars(self, counts: list[int], edges: list[float]) -> Any:
        bars = self._swanlab.echarts.Bar()
        bars.add_xaxis([f"{edge:.4g}" for edge in edges[:-1]])
        bars.add_yaxis("values", counts)
        return bars
