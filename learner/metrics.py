"""Reports each learner step to the run's trackers and as a line of JSON; `learner.gauges` declares the names."""

import json
import math
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
from learner.samples import Sample, markdown_code
from learner.trackers.feed import FedSink
from learner.trackers.opening import TB
from learner.trackers.sink import Histograms, Samples, Scalars, Sink, Summary, Text
from learner.trackers.tensorboard import TensorBoardSink
from learner.trajectory import FOREIGN, Trajectory
from protocol.failures import FailureCounts, describe
from protocol.files import write_whole
from protocol.gauges import LEARNER_STEP, MAX_GAUGE_NAME


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
    """Return scalars of the trajectories that arrived since the last step and of those trained in it.

    What teachers wrote says nothing about the policy, so it is left out.
    """
    arrived = [t for t in arrived if t.origin not in FOREIGN]
    if not arrived:
        return {}
    finished = [t for t in arrived if t.status != "failed"]
    failed_share = {"rollout/failed_share": 1 - len(finished) / len(arrived)}
    if not finished:
        return failed_share
    returns = np.array([t.return_ for t in finished])
    turns = np.array([t.action_turns for t in finished])
    correct = share_correct(finished)
    lengths = [t.window_tokens for t in trained if t.origin not in FOREIGN]
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
            "rollout/length_trained_mean_tokens": float(np.mean(lengths or [0])),
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
    finished = [t for t in arrived if t.status != "failed" and t.origin not in FOREIGN]
    values: dict[str, list[float]] = {}
    for t in finished:
        for name, value in t.reward_by_name.items():
            values.setdefault(name, []).append(value)
    several = dict(islice(values.items(), MAX_REWARDS)) if len(values) > 1 else {}
    return {
        "return_generated": np.array([t.return_ for t in finished]),
        **{f"reward/{name}": np.array(of_name) for name, of_name in several.items()},
    }


MAX_EVALUATION_TAGS = 20
"""Most metrics of evaluations that a heartbeat carries."""
EVALUATION_TAG = "evaluation/"


class NewestStep:
    """What heartbeats say of the newest step, and of the newest evaluation of each set.

    Example:
        >>> newest = NewestStep()
        >>> newest.note({"evaluation/accuracy": 0.5})
        >>> newest.note({"learner/loss": 2.0, "learner/learning_rate": 1e-3, "reward/exact": 1.0})
        >>> newest.gauges
        (('learner/loss', 2.0), ('reward/exact', 1.0), ('evaluation/accuracy', 0.5))
    """

    def __init__(self) -> None:
        # Invariant: the link's thread reads this; the learner's thread replaces it as a whole.
        self.gauges: tuple[tuple[str, float], ...] = ()
        """Names and values, few enough for one heartbeat."""
        self._step: dict[str, float] = {}
        self._evaluations: dict[str, float] = {}

    def note(self, scalars: Mapping[str, float]) -> None:
        """Take the metrics of a step or of an evaluation."""
        found = {
            name: value
            for name, value in scalars.items()
            if math.isfinite(value) and len(name) <= MAX_GAUGE_NAME and name.isascii()
        }
        step = {name: found[name] for name in LEARNER_STEP if name in found}
        if step:
            rewards = {name: value for name, value in found.items() if name.startswith(REWARD)}
            self._step = step | dict(islice(rewards.items(), MAX_REWARDS))
        evaluated = {name: value for name, value in found.items() if name.startswith(EVALUATION_TAG)}
        self._evaluations = dict(islice((self._evaluations | evaluated).items(), MAX_EVALUATION_TAGS))
        self.gauges = (*self._step.items(), *self._evaluations.items())


class Report:
    """Hands records to the sinks of the trackers, and writes lines of ``run_dir/metrics.jsonl``.

    Args:
        run_dir: run folder.
        sinks: see `learner.trackers`; None: TensorBoard's alone, below ``run_dir/tb``.
        wall_clock: returns the seconds since 1970 (UTC), which each record has; in a line it is ``time``.

    Raises:
        KeyError: a metric of the learner is not declared in `learner.gauges`; so no metric goes undocumented.
    """

    def __init__(
        self,
        run_dir: Path,
        wall_clock: Callable[[], float] = time.time,
        *,
        sinks: Sequence[Sink] | None = None,
    ) -> None:
        self._path = run_dir / METRICS
        self._sinks = [TensorBoardSink(run_dir / TB)] if sinks is None else list(sinks)
        self._fed = [sink for sink in self._sinks if isinstance(sink, FedSink)]
        self._wall_clock = wall_clock
        self._reasons = 0
        self.newest = NewestStep()
        self._open()

    def _open(self) -> None:
        # The file stays open until close.
        self._lines = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def rewind(self, step: int) -> None:
        """Delete the reports after ``step``; a run that continues from a checkpoint reports them again."""
        self._lines.close()
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
        # The file is replaced as a whole, because a crash in the middle must not lose the kept lines.
        write_whole(self._path, "".join(line + "\n" for line in kept))
        self._open()
        for sink in self._sinks:
            sink.rewind(step)

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
        if unknown := [name for name in scalars if not is_declared(name)]:
            raise KeyError(unknown[0])
        everything = {**(passed_on or {}), **scalars, **self._of_trackers()}
        shown = {
            histogram_tag(name): values[np.isfinite(values)] for name, values in (histograms or {}).items()
        }
        shown = {name: values for name, values in shown.items() if values.size}
        self.newest.note(everything)
        at = self._wall_clock()
        for sink in self._sinks:
            if shown:
                sink.write(Histograms(step, at, shown))
            sink.write(Scalars(step, at, everything))
        self._write_line({"step": step, **everything}, at)

    def _of_trackers(self) -> dict[str, float]:
        """Return how many records the trackers did not take; empty where only TensorBoard is one."""
        return {"learner/tracker_records_lost": float(sum(s.lost for s in self._fed))} if self._fed else {}

    def note(self, step: int, text: str) -> None:
        """Record a sentence for a person: `offbeat train` prints it, and trackers show it as text."""
        at = self._text(step, "notes", text)
        self._write_line({"step": step, "note": text}, at)

    def _write_line(self, line: Mapping[str, Any], at: float) -> None:
        self._lines.write(json.dumps({**line, TIME: round(at, 3)}) + "\n")
        self._lines.flush()

    def write_failures(self, step: int, failures: FailureCounts) -> None:
        """Record why episodes failed, as a table in Markdown, whenever there is a new reason."""
        rows = failures.rows()
        if len(rows) == self._reasons:
            return
        self._reasons = len(rows)
        lines = [
            f"| {count} | {markdown_code(describe(failure))} |" for failure, count in failures.most_frequent()
        ]
        self._text(step, "failures", "\n".join(["| episodes | why they failed |", "|---|---|", *lines]))

    def _text(self, step: int, name: str, markdown: str) -> float:
        """Record a text, and return the wall clock of the record."""
        at = self._wall_clock()
        for sink in self._sinks:
            sink.write(Text(step, at, name, markdown))
        return at

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record what the model wrote, as a table."""
        at = self._wall_clock()
        for sink in self._sinks if samples else ():
            sink.write(Samples(step, at, tuple(samples)))

    def write_summary(self, step: int, result: Mapping[str, Any]) -> None:
        """Record the learner's result, which trackers show as the run's summary."""
        at = self._wall_clock()
        for sink in self._sinks:
            sink.write(Summary(step, at, result))

    def close(self, *, failed: bool = False) -> None:
        """Close the file and all sinks.

        Args:
            failed: whether the learner ends with an error, which trackers show.
        """
        self._lines.close()
        for sink in self._sinks:
            sink.close(failed=failed)

    @property
    def abandoned(self) -> list[str]:
        """Names of the trackers that were still in a call when they were closed."""
        return [sink.name for sink in self._fed if sink.abandoned]


def _step(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinity if a crash cut the line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
