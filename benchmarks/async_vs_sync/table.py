"""Ratios, tables and a plot of the runs of `benchmarks.async_vs_sync`. All functions but `plot` are pure."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.async_vs_sync.run import Run
from benchmarks.report import pyplot

SHARE = 0.9
"""Share of the smaller of both modes' reward gains. Times are compared at the reward that it gives."""


def time_to_tokens(run: Run, tokens: float) -> float | None:
    """Return the seconds until ``tokens`` were trained, interpolated linearly between steps.

    None: never reached.
    """
    return _first([(0.0, 0.0), *((step.time, float(step.tokens)) for step in run.steps)], tokens)


def time_to_reward(run: Run, level: float) -> float | None:
    """Return the seconds until the held-out reward was ``level``, interpolated linearly between snapshots.

    None: never reached.
    """
    return _first([(snapshot.time, snapshot.reward) for snapshot in run.snapshots], level)


def _first(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the time at which a curve first reaches a level. None: never."""
    before: tuple[float, float] | None = None
    for time, value in curve:
        if value >= level:
            if before is None or value == before[1]:
                return time
            return before[0] + (time - before[0]) * (level - before[1]) / (value - before[1])
        before = time, value
    return None


def token_ratio(sync: Run, async_: Run) -> float | None:
    """Return the time of lockstep over the time of the asynchronous run, to the tokens that both trained."""
    tokens = min(run.steps[-1].tokens for run in (sync, async_))
    return _over(time_to_tokens(sync, tokens), time_to_tokens(async_, tokens))


def reward_ratio(sync: Run, async_: Run) -> float | None:
    """Return the time of lockstep over the time of the asynchronous run, to a common held-out reward.

    That reward is the first weights' reward plus `SHARE` of the smaller gain of the two runs.
    """
    start = statistics.mean(run.snapshots[0].reward for run in (sync, async_))
    best = min(max(snapshot.reward for snapshot in run.snapshots) for run in (sync, async_))
    level = start + SHARE * (best - start)
    return _over(time_to_reward(sync, level), time_to_reward(async_, level))


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def pairs(runs: Sequence[Run], arm: str) -> list[tuple[Run, Run]]:
    """Return pairs of the lockstep run and the asynchronous run of the same seed."""
    of_arm = [run for run in runs if run.arm == arm]
    by = {(run.seed, run.mode): run for run in of_arm}
    seeds = sorted({run.seed for run in of_arm})
    return [(by[s, "sync"], by[s, "async"]) for s in seeds if (s, "sync") in by and (s, "async") in by]


def tables(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Return two Markdown tables: the ratios, and where the time went."""
    rows = [
        "| arm | repetitions | time to equal trained tokens: sync / async | to equal held-out reward |",
        "|---" * 4 + "|",
    ]
    for arm in arms:
        both = pairs(runs, arm)
        if both:
            tokens, rewards = ([ratio(*pair) for pair in both] for ratio in (token_ratio, reward_ratio))
            rows.append(f"| {arm} | {len(both)} | {_spread(tokens)} | {_spread(rewards)} |")
    more = [
        "| arm | mode | s per step | trained tokens/s | idle learner / generator | episodes under way | lag mean / max "
        "| reward before, after | cores used: learner, generator, actor, broker; others |",
        "|---" * 9 + "|",
    ]
    for arm in arms:
        for mode in ("sync", "async"):
            of_mode = [run for run in runs if (run.arm, run.mode) == (arm, mode)]
            if of_mode:
                more.append(_row(arm, mode, of_mode))
    return "\n".join(["**Median, in brackets least and most**", "", *rows, "", *more])


def headlines(runs: Sequence[Run], arms: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the ratio of each arm in trained tokens, for the README."""
    return [
        (
            f"asynchronous, arm `{arm}`: speed to equal trained tokens",
            "lockstep on the same cores",
            _spread([token_ratio(*pair) for pair in both]),
        )
        for arm in arms
        if (both := pairs(runs, arm))
    ]


def _row(arm: str, mode: str, runs: Sequence[Run]) -> str:
    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    cores = []
    for role in ("learner", "generator", "actor", "broker", "others"):
        measured = [run.cpu[role] for run in runs if role in run.cpu]
        cores.append(f"{median(measured):.2f}" if measured else "-")
    return (
        f"| {arm} | {mode} | {median([run.seconds / len(run.steps) for run in runs]):.2f} "
        f"| {median([run.steps[-1].tokens / run.seconds for run in runs]):,.0f} "
        f"| {median([run.idle_learner for run in runs]):.0%} / {median([run.idle_generator for run in runs]):.0%} "
        f"| {median([run.episodes_running for run in runs]):.0f} "
        f"| {median([run.lag_mean for run in runs]):.1f} / {max(run.lag_max for run in runs)} "
        f"| {median([run.snapshots[0].reward for run in runs]):.2f}, "
        f"{median([run.snapshots[-1].reward for run in runs]):.2f} "
        f"| {', '.join(cores)} |"
    )


def summary(run: Run) -> str:
    """Return one line of text about one run."""
    return f"seed {run.seed}, {len(run.steps)} steps in {run.seconds:.1f} s {_row(run.arm, run.mode, [run])}"


def _spread(values: Sequence[float | None]) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    text = f"{statistics.median(reached):.2f} [{min(reached):.2f}, {max(reached):.2f}]"
    return text if len(reached) == len(values) else f"{text} ({len(reached)} of {len(values)})"


def plot(runs: Sequence[Run], arms: Sequence[str], path: Path) -> None:
    """Plot the held-out reward over wall time, with one panel per arm. The seed stands at the end of each line."""
    plt = pyplot()
    shown = [arm for arm in arms if pairs(runs, arm)]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.6 * lines), layout="constrained", squeeze=False
    )
    for place, axis in enumerate(axes.flat):
        if place >= len(shown):
            axis.set_visible(False)
            continue
        for run in (run for pair in pairs(runs, shown[place]) for run in pair):
            colour = "#d62728" if run.mode == "async" else "#444444"
            first = run.seed == min(r.seed for r in runs)
            points = [(snapshot.time, snapshot.reward) for snapshot in run.snapshots]
            axis.plot(
                *zip(*points, strict=True), color=colour, linewidth=1.3, label=run.mode if first else None
            )
            axis.annotate(
                f"seed {run.seed}", points[-1], xytext=(3, 0), textcoords="offset points", fontsize=6, color=colour,
                va="center",
            )  # fmt: skip
        axis.set_title(shown[place], fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xlabel("seconds of training", fontsize=8)
    axes[0][0].set_ylabel("held-out reward", fontsize=8)
    axes[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
