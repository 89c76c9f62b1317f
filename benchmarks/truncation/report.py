"""Results of the runs of `benchmarks.truncation`: reward over time, times to a level, tables and a plot."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import pyplot

ARMS = ("tppo", "streamed", "finished", "waiting")
SMOOTHED = {False: 96, True: 8}
"""Number of short (False) and of long (True) trajectories in the window of the reward curve."""
POINTS = 200
"""Number of points of a reward curve."""


@dataclass(frozen=True)
class Ended:
    """A training trajectory that ended, at the time at which the learner received it."""

    time: float
    """Seconds of training."""
    long: bool
    reward: float
    tokens: int


@dataclass(frozen=True)
class Run:
    """Results of one learner."""

    arm: str
    seed: int
    minutes: float
    start: float
    """Mean reward on held-out tasks before training."""
    end: float
    """Mean reward on held-out tasks after training."""
    curve: list[tuple[float, float]]
    """Points of the reward curve: seconds of training, and mean reward at that time."""
    steps: int
    tokens_per_second: float
    """Trained tokens per second."""
    generated_per_second: float
    idle_learner: float
    idle_generator: float
    running_requests: float
    """Mean over the steps."""
    lag_mean: float
    lag_max: int
    stale_tokens: float
    """Share of the action tokens in batches that were too stale to train on."""
    tokens_mean: float
    """Mean action tokens per finished trajectory."""
    tokens_99: float
    """99 % quantile of the action tokens per finished trajectory."""
    tokens_mean_last: float
    """Mean action tokens over the last fifth of the finished trajectories."""
    tail: float = field(default=0.0)
    """Length of the longest trajectory of a batch over the mean length, averaged over batches."""


def smoothed(ended: Sequence[Ended], *, long_share: float) -> list[tuple[float, float]]:
    """Return the mean reward over time, in windows centred on each moment.

    Short and long tasks have separate windows, and are weighted with their shares of the tasks. The curve
    covers the moments at which the windows of both kinds lie wholly inside the run.
    """
    weights = {kind: share for kind, share in ((False, 1 - long_share), (True, long_share)) if share}
    series = {kind: _moving([e for e in ended if e.long == kind], SMOOTHED[kind]) for kind in weights}
    if any(not len(times) for times, _ in series.values()):
        return []
    first, last = (
        max(times[0] for times, _ in series.values()),
        min(times[-1] for times, _ in series.values()),
    )
    moments = np.linspace(first, max(first, last), POINTS)
    rewards = sum(weights[kind] * np.interp(moments, *pair) for kind, pair in series.items())
    return [
        (round(float(t), 2), round(float(r), 4)) for t, r in zip(moments, np.asarray(rewards), strict=True)
    ]


def _moving(ended: Sequence[Ended], size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean times and the mean rewards of all sequences of ``size`` neighbours."""
    if len(ended) < size:
        return np.empty(0), np.empty(0)
    kernel = np.full(size, 1 / size)
    times, rewards = np.array([e.time for e in ended]), np.array([e.reward for e in ended])
    return np.convolve(times, kernel, "valid"), np.convolve(rewards, kernel, "valid")


def seconds_to(run: Run, level: float) -> float | None:
    """Return the time at which the curve first reaches a level, or None if it never does."""
    return next((t for t, reward in run.curve if reward >= level), None)


def ratios(runs: Sequence[Run], arm: str, share: float) -> list[float]:
    """Return for each seed the arm's time to a share of the waiting arm's gain, over the time of tppo.

    Seeds in which one of the two never got there are left out.
    """
    found = []
    for seed in sorted({run.seed for run in runs}):
        times = times_to(runs, seed, share)
        ours, theirs = times.get("tppo"), times.get(arm)
        if ours is not None and theirs is not None:
            found.append(theirs / max(ours, 1e-9))
    return found


def times_to(runs: Sequence[Run], seed: int, share: float) -> dict[str, float | None]:
    """Return for each arm the seconds to a share of the gain of the waiting arm with the same seed."""
    of_seed = {run.arm: run for run in runs if run.seed == seed}
    waiting = of_seed.get("waiting")
    if waiting is None:
        return {}
    level = waiting.start + share * (waiting.end - waiting.start)
    return {arm: seconds_to(run, level) for arm, run in of_seed.items()}


def tables(runs: Sequence[Run], shares: Sequence[float]) -> str:
    """Return Markdown tables: the times to the levels, and the figures of each arm."""
    seeds = sorted({run.seed for run in runs})
    arms = [arm for arm in ARMS if any(run.arm == arm for run in runs)]
    blocks = []
    for share in shares:
        rows = [f"| arm | {' | '.join(f'seed {seed}' for seed in seeds)} | time over tppo, median [spread] |"]
        rows.append("|---" * (len(seeds) + 2) + "|")
        for arm in arms:
            times = [_seconds(times_to(runs, seed, share).get(arm)) for seed in seeds]
            rows.append(f"| {arm} | {' | '.join(times)} | {_spread(ratios(runs, arm, share), len(seeds))} |")
        blocks.append("\n".join([f"**Seconds to {share:.0%} of the waiting arm's gain**", "", *rows]))
    rows = [
        "| arm | reward before | reward after | steps | trained tokens/s | generated tokens/s "
        "| idle learner / generator | running requests | lag mean / max | stale tokens "
        "| tokens per response mean / 99% / mean at the end | longest over mean |",
        "|---" * 12 + "|",
    ]
    rows += [row(arm, [run for run in runs if run.arm == arm]) for arm in arms]
    title = (
        f"**After {runs[0].minutes:g} minutes of training each** (median over seeds; reward: median [spread])"
    )
    return "\n\n".join([*blocks, "\n".join([title, "", *rows])])


def row(arm: str, runs: Sequence[Run]) -> str:
    def median(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs))

    return (
        f"| {arm} | {median('start'):.3f} | {_spread([run.end for run in runs], len(runs), 3)} "
        f"| {median('steps'):.0f} | {median('tokens_per_second'):,.0f} | {median('generated_per_second'):,.0f} "
        f"| {median('idle_learner'):.0%} / {median('idle_generator'):.0%} | {median('running_requests'):.1f} "
        f"| {median('lag_mean'):.2f} / {max(run.lag_max for run in runs)} | {median('stale_tokens'):.1%} "
        f"| {median('tokens_mean'):.0f} / {median('tokens_99'):.0f} / {median('tokens_mean_last'):.0f} "
        f"| {median('tail'):.1f} |"
    )


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f}"


def _spread(values: Sequence[float], wanted: int, digits: int = 2) -> str:
    if not values:
        return "-"
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        text += f" [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    return text if len(values) == wanted else f"{text} ({len(values)} of {wanted} seeds)"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot the reward over wall time, with one colour per arm and one line per seed."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = dict(zip(ARMS, ("#d62728", "#ff9896", "#1f77b4", "#444444"), strict=True))
    for run in runs:
        if run.curve:
            label = run.arm if run.seed == runs[0].seed else None
            axes.plot(*zip(*run.curve, strict=True), color=colours[run.arm], label=label, linewidth=1.3)
    axes.set(xlabel="seconds of training", ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title("Long-tailed responses; one line a seed", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
