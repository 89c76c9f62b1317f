"""TensorBoard: event files in the run folder. It is written at once, without a queue, because it is a local file."""

from pathlib import Path
from typing import Any, assert_never

from learner.samples import markdown_table
from learner.trackers.sink import Histograms, Record, Samples, Scalars, Summary, Text
from protocol.gauges import tag

CHARTS: dict[str, tuple[str, ...]] = {
    "reward": ("rollout/return_mean", "rollout/correct_share", "reward/"),
    "held-out": ("evaluation/accuracy", "evaluation/return_mean"),
    "length (tokens)": ("rollout/length_mean_tokens", "rollout/length_trained_mean_tokens"),
    "lag (versions)": ("learner/policy_lag_mean_versions", "learner/policy_lag_max_versions"),
    "idle (share)": ("learner/idle_share", tag("generator", "idle_share")),
    "failures (share)": ("rollout/failed_share", "learner/stale_token_fraction"),
}
"""Charts of TensorBoard's tab *Custom scalars*, in the order in which a person looks at them. A name that ends in "/"
stands for all metrics below it."""
OVERVIEW = {
    name: f"1_overview/{number}_{name.replace('/', '_')}"
    for number, name in enumerate(
        (name for names in CHARTS.values() for name in names if not name.endswith("/")), start=1
    )
}
"""Metrics that TensorBoard shows twice, each with its second tag. The tags sort before all others, so the page that
TensorBoard opens begins with them."""


class TensorBoardSink:
    """Writes TensorBoard events below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin(purge_step=None)

    def _begin(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self._folder), purge_step=purge_step)
        # TensorBoard takes a tag for a regular expression that matches the beginning of a name.
        tags = {
            title: [name if name.endswith("/") else f"{name}$" for name in names]
            for title, names in CHARTS.items()
        }
        self._writer.add_custom_scalars({"run": {title: ["Multiline", tags[title]] for title in tags}})

    def write(self, record: Record) -> None:
        """Write a record; a summary has no place in TensorBoard."""
        match record:
            case Scalars(step, at, values):
                from tensorboard.compat.proto.summary_pb2 import Summary as Event

                again = {tag: values[name] for name, tag in OVERVIEW.items() if name in values}
                row = [
                    Event.Value(tag=name, simple_value=value) for name, value in {**values, **again}.items()
                ]
                # All scalars go into one event, because one event for each takes six times as long.
                self._writer.file_writer.add_summary(Event(value=row), step, walltime=at)
            case Histograms(step, at, values):
                for name, of_name in values.items():
                    self._writer.add_histogram(name, of_name, step, walltime=at)
                # The scalars of the step follow, with which the file is flushed.
                return
            case Text(step, at, name, markdown):
                self._writer.add_text(name, markdown, step, walltime=at)
            case Samples(step, at, samples):
                self._writer.add_text("samples", markdown_table(samples), step, walltime=at)
            case Summary():
                return
            case _:
                assert_never(record)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Let TensorBoard hide the events after ``step``."""
        self._writer.close()
        self._begin(purge_step=step + 1)

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()
