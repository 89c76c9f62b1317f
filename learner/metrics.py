"""Reports each learner step as TensorBoard events and a line of JSON; `learner.gauges` declares the names."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.gauges import HISTOGRAMS, REWARD, is_declared
from learner.intake.evaluation import mean_rewards, share_correct
from learner.run_files import METRICS
from learner.samples import Sample, markdown_code, markdown_table
from learner.trajectory import Trajectory
from protocol.failures import FailureCounts, describe
from protocol.files import write_whole
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


def histogram_tag(name: str) -> str:
    """Return the tag of a histogram.

    Raises:
        KeyError: the histogram is not declared.

    Example:
        >>> histogram_tag("return_generated"), histogram_tag("reward/exact")
        ('histogram/return_generated', 'histogram/reward/exact')
    """
    HISTOGRAMS["reward/NAME" if name.startswith("reward/") else name]
    return f"histogram/{name}"


TIME = "time"
"""Key of the wall clock in a line of metrics.jsonl: seconds since 1970 (UTC), when the line was written."""
MAX_REWARDS = 16
"""Most rewards of different names that get a histogram."""


def rollout_metrics(arrived: Sequence[Trajectory], trained: Sequence[Trajectory]) -> dict[str, float]:
    """Return scalars of the trajectories that arrived since the last step and of those trained in it."""
    if not arrived:
        return {}
    finished = [t for t in arrived if t.status != "failed"]
    failed_share = {"rollout/failed_share": 1 - len(finished) / len(arrived)}
    if not finished:
        return failed_share
    returns = np.array([t.return_ for t in finished])
    turns = np.array([t.action_turns for t in finished])
    correct = share_correct(finished)
    right = {} if correct is None else {"rollout/correct_share": correct}
    return (
        failed_share
        | right
        | {REWARD + name: mean for name, mean in mean_rewards(finished).items()}
        | {
            "rollout/reward_mean": float(returns.sum() / max(1, turns.sum())),
            "rollout/return_mean": float(returns.mean()),
            "rollout/return_std": float(returns.std()),
            "rollout/length_mean_tokens": float(np.mean([t.action_tokens for t in finished])),
            "rollout/length_trained_mean_tokens": float(np.mean([t.window_tokens for t in trained] or [0])),
            "rollout/turns_mean": float(turns.mean()),
            "rollout/branches_mean": float(np.mean([t.branch_count for t in finished])),
            "rollout/begun_anew_fraction": _begun_anew_fraction(finished),
            "rollout/auxiliary_fraction": _auxiliary_fraction(finished),
        }
    )


def _begun_anew_fraction(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of the tokens that are prompts of further conversations of an episode, rendered as a whole."""
    prompts = sum(t.end - t.start for one in trajectories for t in one.turns if t.index and not t.back)
    return prompts / max(1, sum(map(len, trajectories)))


def _auxiliary_fraction(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of the action tokens that the environment wants left out of training."""
    sampled = sum(t.action_tokens for t in trajectories)
    return sum(t.action_tokens - int(t.learned_mask.sum()) for t in trajectories) / max(1, sampled)


def return_histograms(arrived: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return the returns of the trajectories that arrived, and their rewards by name if there are several."""
    finished = [t for t in arrived if t.status != "failed"]
    values: dict[str, list[float]] = {}
    for t in finished:
        for name, value in t.reward_by_name.items():
            values.setdefault(name, []).append(value)
    several = dict(islice(values.items(), MAX_REWARDS)) if len(values) > 1 else {}
    return {
        "return_generated": np.array([t.return_ for t in finished]),
        **{f"reward/{name}": np.array(of_name) for name, of_name in several.items()},
    }


class Report:
    """Writes TensorBoard events below ``run_dir/tb`` and lines of ``run_dir/metrics.jsonl``.

    Args:
        run_dir: run folder.
        wall_clock: returns the seconds since 1970 (UTC), which each line has as ``time``.

    Raises:
        KeyError: a metric of the learner is not declared in `learner.gauges`; so no metric goes undocumented.
    """

    def __init__(self, run_dir: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._folder = run_dir / "tb"
        self._path = run_dir / METRICS
        self._reasons = 0
        self._open(purge_step=None)

    def rewind(self, step: int) -> None:
        """Delete the reports after ``step``; a run that continues from a checkpoint reports them again."""
        self.close()
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
        # The file is replaced as a whole, because a crash in the middle must not lose the kept lines.
        write_whole(self._path, "".join(line + "\n" for line in kept))
        self._open(purge_step=step + 1)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self._folder), purge_step=purge_step)
        # TensorBoard takes a tag for a regular expression that matches the beginning of a name.
        tags = {
            title: [name if name.endswith("/") else f"{name}$" for name in names]
            for title, names in CHARTS.items()
        }
        self._writer.add_custom_scalars({"run": {title: ["Multiline", tags[title]] for title in tags}})
        # The file stays open until close.
        self._lines = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, NDArray[Any]] | None = None,
        passed_on: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step.

        Args:
            scalars: the learner's own metrics.
            histograms: values by name; values that are not finite are left out.
            passed_on: metrics of broker, generators, actors and environments, as the broker sent them.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        if unknown := [name for name in scalars if not is_declared(name)]:
            raise KeyError(unknown[0])
        everything = {**(passed_on or {}), **scalars}
        again = {tag: everything[name] for name, tag in OVERVIEW.items() if name in everything}
        row = [Summary.Value(tag=name, simple_value=value) for name, value in {**everything, **again}.items()]
        # All scalars go into one event, because one event for each takes six times as long.
        self._writer.file_writer.add_summary(Summary(value=row), step)
        for name, values in (histograms or {}).items():
            values, shown = values[np.isfinite(values)], histogram_tag(name)
            if values.size:
                self._writer.add_histogram(shown, values, step)
        self._writer.flush()
        self._write_line({"step": step, **everything})

    def note(self, step: int, text: str) -> None:
        """Record a sentence for a person: `offbeat train` prints it, and TensorBoard has it in its text tab."""
        self._writer.add_text("notes", text, step)
        self._writer.flush()
        self._write_line({"step": step, "note": text})

    def _write_line(self, line: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({**line, TIME: round(self._wall_clock(), 3)}) + "\n")
        self._lines.flush()

    def write_failures(self, step: int, failures: FailureCounts) -> None:
        """Record why episodes failed, as a table in TensorBoard's text tab, whenever there is a new reason."""
        rows = failures.rows()
        if len(rows) == self._reasons:
            return
        self._reasons = len(rows)
        lines = [
            f"| {count} | {markdown_code(describe(failure))} |" for failure, count in failures.most_frequent()
        ]
        table = "\n".join(["| episodes | why they failed |", "|---|---|", *lines])
        self._writer.add_text("failures", table, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record what the model wrote, as a table in TensorBoard's text tab."""
        if samples:
            self._writer.add_text("samples", markdown_table(samples), step)
            self._writer.flush()

    def close(self) -> None:
        """Close both files."""
        self._writer.close()
        self._lines.close()


def _step(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinity if a crash cut the line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
