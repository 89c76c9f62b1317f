"""Tables and figure of docs/staleness.md, from finished cells."""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.frontier import agreement
from benchmarks.frontier.cells import (
    ALWAYS,
    FIRST_LAGS,
    FIXED_RATES,
    LEAST_STEPS,
    LONG_LAGS,
    LONG_SEEDS,
    OWN,
    RATES,
    SWEEP_SEED,
    SWEPT_LAGS,
    TASKS,
    WHY_RATE,
    WHY_ROWS,
    WHY_TASKS,
    Found,
    algorithm_of,
    chosen_rate,
    rows,
    settings_of,
)
from benchmarks.report import half_interval, pyplot, save_results
from launch.supervise.summary import apart
from learner.update.adaptive import optimizer_steps_per_update

COLLAPSED = 0.05
"""Reward at lag 0 below which a share of it says nothing."""
MISSING = "missing"
FAILS, HOLDS = 0.7, 0.9
"""Share of its reward that the uncorrected row must lose, and that another row must keep, so that a task separates."""
NUMBERS = {
    "ess": "effective sample size",
    "cosine": "cosine with the fresh gradient",
    "turned": "cosine of two batches",
    "entropy": "entropy, nats",
    "clipped": "clipped",
    "cut": "weight cut",
    "acted": "acted on",
}
"""Columns of the second table, by the name of the number."""
ALONG = {
    "moved": "KL of proximal and behaviour, nats",
    **NUMBERS,
    "seen": "looks with a gradient",
}
"""Columns of the table of what the rows do while they learn."""
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red")
LABEL_GAP = 0.05
TOP = 1.04
"""Upper end of the figure."""
LEAST_ROWS = 5
"""Rows below which a task has no panel."""


class Mean(NamedTuple):
    """A mean over seeds."""

    value: float
    half: float | None
    """Half of the 90 % interval; None with fewer than three seeds, of which an interval says nothing."""
    seeds: int
    least: float
    most: float

    def __str__(self) -> str:
        if self.half is not None:
            return f"{self.value:.2f} ± {self.half:.2f}"
        return (
            f"{self.value:.2f} [{self.least:.2f}, {self.most:.2f}]" if self.seeds > 1 else f"{self.value:.2f}"
        )

    @property
    def band(self) -> tuple[float, float]:
        """The interval, or else the least and the greatest value."""
        if self.half is None:
            return self.least, self.most
        return self.value - self.half, self.value + self.half


def mean_of(values: Sequence[float]) -> Mean | None:
    """Return the mean with the half-width of its 90 % interval; None if there is no value.

    Example:
        >>> str(mean_of([0.8, 0.9, 1.0])), str(mean_of([0.5, 0.7])), str(mean_of([0.5])), mean_of([])
        ('0.90 ± 0.17', '0.60 [0.50, 0.70]', '0.50', None)
    """
    if not values:
        return None
    half = half_interval(values, 0.95) if len(values) > 2 else None
    return Mean(statistics.fmean(values), half, len(values), min(values), max(values))


class Kept(NamedTuple):
    """Reward at a lag, and its share of the reward without lag, over the seeds that have both."""

    reward: float
    share: float
    seeds: int


class Results:
    """Finished cells, and what is asked of them."""

    def __init__(self, found: Iterable[Found]) -> None:
        # A cell that was measured again replaces the earlier one.
        self.found = list({f.cell: f for f in found}.values())
        self._rates: dict[tuple[str, str], float | None] = {}

    def rate(self, task: str, row: str) -> float | None:
        """Return the rate that the sweep has chosen."""
        if (task, row) not in self._rates:
            self._rates[task, row] = chosen_rate(self.found, task, row)
        return self._rates[task, row]

    def cells(self, task: str, row: str, lag: int, steps: int, rate: float | None = None) -> dict[int, Found]:
        """Return the cells with so many steps by seed, at a rate, or else at the chosen one."""
        rate = self.rate(task, row) if rate is None else rate
        return {
            f.seed: f
            for f in self.found
            if (f.task, f.row, f.lag, f.rate, f.steps, f.again) == (task, row, lag, rate, steps, 0)
            and f.seed != SWEEP_SEED
        }

    def by_seed(
        self, task: str, row: str, lag: int, steps: int, rate: float | None = None
    ) -> dict[int, float]:
        """Return the scores by seed; 0 for a run that did not come to its end.

        The rate does not change along a run, so a longer run begins with the shorter one, and is scored there, too.
        """
        scores = {}
        for longer in (4 * lag for lag in LONG_LAGS):
            for seed, f in self.cells(task, row, lag, longer, rate).items():
                if steps in f.scores:
                    scores[seed] = f.scores[steps]
        for seed, f in self.cells(task, row, lag, steps, rate).items():
            scores[seed] = f.score or 0.0
        return scores

    def scores(
        self, task: str, row: str, lag: int, steps: int, seeds: Sequence[int], rate: float | None = None
    ) -> list[float]:
        """Return the scores of the seeds that were run."""
        found = self.by_seed(task, row, lag, steps, rate)
        return [found[seed] for seed in seeds if seed in found]

    def swept(self, task: str, row: str, lag: int, rate: float) -> float | None:
        """Return the reward of a cell of the sweep; None if it was not measured."""
        for f in self.found:
            if (f.task, f.row, f.lag, f.rate, f.seed) == (task, row, lag, rate, SWEEP_SEED):
                return f.score or 0.0
        return None

    def first(self, task: str, row: str, lag: int) -> Mean | None:
        """Return the reward of the first stage."""
        return mean_of(self.scores(task, row, lag, LEAST_STEPS, LONG_SEEDS))

    def long(self, task: str, row: str, lag: int, steps: int) -> Mean | None:
        """Return the reward of the second stage."""
        return mean_of(self.scores(task, row, lag, steps, LONG_SEEDS))

    def kept(self, task: str, row: str, lag: int, steps: int, rate: float | None = None) -> "Kept | None":
        """Return what a row keeps of its reward without lag, over the seeds that were run with and without.

        Other seeds say nothing of a share: on a sparse task some find nothing at any lag. None if there is no such
        seed, or no reward to keep.
        """
        old, fresh = (self.by_seed(task, row, which, steps, rate) for which in (lag, 0))
        seeds = [seed for seed in LONG_SEEDS if seed in old and seed in fresh]
        whole = statistics.fmean(fresh[seed] for seed in seeds) if seeds else 0.0
        if whole < COLLAPSED:
            return None
        reward = statistics.fmean(old[seed] for seed in seeds)
        return Kept(reward, reward / whole, len(seeds))

    def number(self, task: str, row: str, lag: int, name: str, steps: int = LEAST_STEPS) -> float | None:
        """Return the mean of a number over the seeds; None if no cell has it."""
        values = [
            value
            for f in self.cells(task, row, lag, steps).values()
            if (value := getattr(f, name) if name in ("cosine", "turned") else f.numbers.get(name))
            is not None
        ]
        return statistics.fmean(values) if values else None

    def rows(self, task: str) -> list[str]:
        """Return the rows of a task that have a rate, the best first: at lag 16, or at 64 where rates are fixed."""
        measured = {f.row for f in self.found if f.task == task}
        known = [row for row in rows() if row in measured and self.rate(task, row) is not None]

        def key(row: str) -> tuple[float, ...]:
            means = (
                self.first(task, row, max(FIRST_LAGS)),
                self.long(task, row, LONG_LAGS[0], 4 * LONG_LAGS[0]),
            )
            if task in FIXED_RATES:
                means = means[::-1]  # there the large lag has more rows
            return tuple(-1.0 if mean is None else mean.value for mean in means)

        return sorted(known, key=key, reverse=True)


def of_all_tasks(table: Callable[[str], str]) -> str:
    """Return the tables of all tasks, each below the name of its task."""
    return "\n\n".join(f"**{task}**\n\n{table(task)}" for task in TASKS)


def reward_table(results: Results, task: str) -> str:
    """Return reward over lag of the first stage, a line for each row."""
    lags = [f"lag {lag}" for lag in FIRST_LAGS]
    head = ["recipe", "optimizer steps a batch", "rate", "seeds", *lags, "lag 16 / lag 0"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in results.rows(task):
        means = [results.first(task, row, lag) for lag in FIRST_LAGS]
        steps = optimizer_steps_per_update(algorithm_of(row)[0])
        seeds = " / ".join("0" if mean is None else str(mean.seeds) for mean in means)
        shown_means = [
            swept(results, task, row, lag) if mean is None else str(mean)
            for lag, mean in zip(FIRST_LAGS, means, strict=True)
        ]
        cells = [anchored(row, task), str(steps), f"{results.rate(task, row):g}", seeds, *shown_means]
        kept = results.kept(task, row, max(FIRST_LAGS), LEAST_STEPS)
        lines.append(f"| {' | '.join([*cells, share(kept, means[-1])])} |")
    absent = [row for row in rows() if row not in results.rows(task)]
    if len(lines) == 2:
        lines = []
    if absent:
        names = ", ".join(anchored(row, task) for row in absent)
        what = names if task == next(iter(TASKS)) else f"{len(absent)} rows"
        lines += ["", f"Missing, because the measurement ended before them: {what}."]
    return "\n".join(lines).strip()


def swept(results: Results, task: str, row: str, lag: int) -> str:
    """Return the reward of the sweep, for a row of which no seed was run; or that it is missing."""
    rate = results.rate(task, row)
    value = None if rate is None else results.swept(task, row, lag, rate)
    return MISSING if value is None else f"{value:.2f} (sweep)"


def rate_table(results: Results, task: str) -> str:
    """Return the rewards of the sweep at lags 0 and 16, at each rate; the chosen rate is bold."""
    head = ["recipe", *(f"rate {rate:g}: lag 0, lag 16" for rate in RATES)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in results.rows(task):
        cells = []
        if all(results.swept(task, row, *place) is None for place in product(SWEPT_LAGS, RATES)):
            continue
        for rate in RATES:
            values = [results.swept(task, row, lag, rate) for lag in SWEPT_LAGS]
            text = ", ".join(MISSING if value is None else f"{value:.2f}" for value in values)
            cells.append(f"**{text}**" if rate == results.rate(task, row) else text)
        lines.append(f"| {' | '.join([named(row), *cells])} |")
    return "\n".join(lines) if len(lines) > 2 else "Missing: the measurement ended before it."


def long_table(results: Results, task: str) -> str:
    """Return reward at large lags, and the share of what the same row has without lag after equally many steps."""
    head = ["recipe", "seeds"]
    for lag in LONG_LAGS:
        head += [f"lag 0, {4 * lag} steps", f"lag {lag}, {4 * lag} steps", "share kept"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in results.rows(task):
        cells: list[str] = []
        seeds = []
        for lag in LONG_LAGS:
            fresh, old = (results.long(task, row, which, 4 * lag) for which in (0, lag))
            cells += [shown(fresh), shown(old), share(results.kept(task, row, lag, 4 * lag), old)]
            seeds.append(0 if old is None else old.seeds)
        if any(seeds):
            lines.append(f"| {' | '.join([named(row), ' / '.join(map(str, seeds)), *cells])} |")
    return "\n".join(lines) if len(lines) > 2 else "Missing: the measurement ended before it."


def number_table(results: Results, task: str) -> str:
    """Return what the rows did to their batches at one lag: at 16, or at 64 where rates are fixed and more was run."""
    lag = LONG_LAGS[0] if task in FIXED_RATES else max(FIRST_LAGS)
    steps = max(LEAST_STEPS, 4 * lag)
    head = f"| recipe | {' | '.join(NUMBERS.values())} |"
    lines = [head, "|---" * (len(NUMBERS) + 1) + "|"]
    for row in results.rows(task):
        values = [results.number(task, row, lag, name, steps) for name in NUMBERS]
        if any(value is not None for value in values):
            shown_values = ["" if value is None else f"{value:.2f}" for value in values]
            lines.append(f"| {named(row)} | {' | '.join(shown_values)} |")
    return "\n".join(lines) if len(lines) > 2 else "Missing: the measurement ended before it."


def along_table(results: Results, task: str) -> str:
    """Return what the rows do in the first half of a run, over the lags, all rows at one rate."""
    lags = sorted({*FIRST_LAGS, *LONG_LAGS})
    head = ["recipe", "reward", *ALONG.values()]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in (row for row in rows() if row in {*WHY_ROWS, *OWN}):
        found = {
            lag: [
                f
                for f in results.cells(task, row, lag, max(LEAST_STEPS, 4 * lag), WHY_RATE).values()
                if f.course
            ]
            for lag in lags
        }
        if any(found.values()):
            values = {lag: early(found[lag]) for lag in lags}
            cells = [" / ".join(two(values[lag].get(name)) for lag in lags) for name in ("score", *ALONG)]
            lines.append(f"| {' | '.join([named(row), *cells])} |")
    return "\n".join(lines) if len(lines) > 2 else "Missing: the measurement ended before it."


def own_table(results: Results) -> str:
    """Return the rewards of our rules beside those of the best published row, on equal seeds and at the same rate.

    A row of fewer seeds than three is no match where another one has more.
    """
    head = [
        "task",
        "lag",
        "rate",
        "rule",
        "reward, seed by seed",
        "`uncorrected`",
        "best published row",
        "seeds won",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task, lag, rate, row in product(TASKS, (*FIRST_LAGS, *LONG_LAGS), RATES, OWN):
        steps = max(LEAST_STEPS, 4 * lag)
        place = (lag, steps, rate)
        ours = results.by_seed(task, row, *place)
        common = {
            other: {
                seed: score for seed, score in results.by_seed(task, other, *place).items() if seed in ours
            }
            for other in rows()
            if other not in OWN
        }
        enough = min(3, max(map(len, common.values())))
        if not enough:
            continue
        best, theirs = max(
            ((other, scores) for other, scores in common.items() if len(scores) >= enough),
            key=lambda item: statistics.fmean(item[1].values()),
        )
        plain = [common[ALWAYS[0]][seed] for seed in theirs if seed in common[ALWAYS[0]]]
        cells = [
            task,
            str(lag),
            f"{rate:g}",
            row,
            ", ".join(two(ours[seed]) for seed in theirs),
            two(statistics.fmean(plain) if plain else None),
            f"{best}: {', '.join(map(two, theirs.values()))}",
            f"{sum(ours[seed] > score for seed, score in theirs.items())} of {len(theirs)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def early(found: Sequence[Found]) -> dict[str, float]:
    """Return the means of reward and numbers over cells; the numbers are those of the first half of their runs."""
    parts = [part for f in found for part in f.course if 2 * part["step"] <= f.steps]
    names = dict.fromkeys(name for part in parts for name in part)
    means = {name: statistics.fmean(part[name] for part in parts if name in part) for name in names}
    means |= {"seen": sum("cosine" in part for part in parts) / len(parts)} if parts else {}
    return means | ({"score": statistics.fmean(f.score or 0.0 for f in found)} if found else {})


def two(value: float | None) -> str:
    """Return a number with two digits, or a dash if there is none."""
    return "-" if value is None else f"{value:.2f}"


def separation(results: Results) -> str:
    """Return for each task whether it separates rows, at the chosen rates and at equal ones, as a table.

    The best of many rows of one seed is mostly luck: a row of fewer seeds than three is no best one where another row
    has more.
    """
    what = "reward, share kept, seeds"
    lines = [
        f"| task | rate | lag | `uncorrected`: {what} | best row: {what} | separates |",
        "|---" * 6 + "|",
    ]
    for task, rate, lag in product(TASKS, (None, *RATES[1:]), (16, *LONG_LAGS)):
        if rate is None and task in FIXED_RATES:
            continue
        kept = kept_at(results, task, lag, rate)
        name = "chosen" if rate is None else f"{rate:g}"
        if ALWAYS[0] not in kept:
            if rate is None:
                lines.append(f"| {task} | {name} | {lag} | {MISSING} | | |")
            continue
        enough = min(3, max(one.seeds for one in kept.values()))
        best = max((row for row in kept if kept[row].seeds >= enough), key=lambda row: kept[row].reward)
        verdict = "yes" if kept[ALWAYS[0]].share < FAILS and kept[best].share >= HOLDS else "no"
        plain, top = (
            f"{kept[row].reward:.2f}, {kept[row].share:.2f}, {kept[row].seeds}" for row in (ALWAYS[0], best)
        )
        lines.append(f"| {task} | {name} | {lag} | {plain} | {best}: {top} | {verdict} |")
    return "\n".join(lines)


def equal_table(results: Results) -> str:
    """Return reward at the first large lag and without lag, where all rows of a task have one rate, the best first."""
    lag = LONG_LAGS[0]
    head = [
        "task",
        "rate",
        "recipe",
        "seeds",
        f"lag 0, {4 * lag} steps",
        f"lag {lag}, {4 * lag} steps",
        "share kept",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task, rate in product(TASKS, RATES[1:]):
        if rate == FIXED_RATES.get(task):
            continue  # the table of large lags has them
        pairs = {
            row: tuple(
                mean_of(results.scores(task, row, which, 4 * lag, LONG_SEEDS, rate)) for which in (0, lag)
            )
            for row in rows()
        }
        measured = {row: (fresh, old) for row, (fresh, old) in pairs.items() if fresh and old}
        for row, (fresh, old) in sorted(measured.items(), key=lambda item: -item[1][1].value):
            cells = [
                task,
                f"{rate:g}",
                named(row),
                str(old.seeds),
                shown(fresh),
                shown(old),
                share(results.kept(task, row, lag, 4 * lag, rate), old),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kept_at(results: Results, task: str, lag: int, rate: float | None = None) -> dict[str, Kept]:
    """Return what each row keeps of its reward without lag, after equally many steps and at one rate."""
    steps = max(LEAST_STEPS, 4 * lag)
    known = results.rows(task) if rate is None else rows()
    found = {row: results.kept(task, row, lag, steps, rate) for row in known}
    return {row: kept for row, kept in found.items() if kept is not None}


def noise(results: Results) -> tuple[str, float]:
    """Return the noise floor in words, and as the root mean square of the difference of a cell run twice."""
    by_cell = {f.cell: f for f in results.found}
    pairs = []
    for f in results.found:
        if f.again:
            first = by_cell.get(replace(f.cell, again=0))
            if first is not None and first.score is not None and f.score is not None:
                pairs.append(abs(f.score - first.score))
    if not pairs:
        return "The noise floor is missing: no cell was run twice.", 0.0
    floor = math.sqrt(statistics.fmean(d * d for d in pairs))
    tasks = " and ".join(task for task in TASKS if any(f.again and f.task == task for f in results.found))
    return (
        f"{len(pairs)} cells of `uncorrected` on {tasks} were run twice, with other samples. Their rewards differ by "
        f"{floor:.3f} in the root mean square, and by {max(pairs):.3f} at most.",
        floor,
    )


def shown(mean: Mean | None) -> str:
    """Return a mean, or that it is missing."""
    return MISSING if mean is None else str(mean)


def share(kept: Kept | None, mean: Mean | None) -> str:
    """Return the share that a row keeps, or that it is missing; with its seeds, if the mean beside it has more."""
    if kept is None:
        return MISSING
    seeds = f" ({counted(kept.seeds)})" if mean is not None and kept.seeds < mean.seeds else ""
    return f"{kept.share:.2f}{seeds}"


def counted(seeds: int) -> str:
    """Return a number of seeds in words."""
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"


def named(row: str) -> str:
    """Return the name of a row, with a link to its recipe."""
    return f"{row} (ours)" if row in OWN else f"[{row}](recipes/staleness.md#{row})"


def anchored(row: str, task: str) -> str:
    """Return the name of a row with the anchor that its recipe links to, which the table of the first task has."""
    return f'<a id="row-{row}"></a>{named(row)}' if task == next(iter(TASKS)) else named(row)


class Published(msgspec.Struct):
    """What a file of results was made from."""

    cells: list[Found] = []
    pairs: list[agreement.Pair] = []


def published(path: Path) -> Published:
    """Read a file of results; nothing if there is none."""
    if not path.exists():
        return Published()
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8"))["results"], Published, strict=False)


def plot(results: Results, path: Path) -> None:
    """Plot reward over lag, a panel for each task with enough rows: five named lines, the other rows in grey."""
    plt = pyplot()
    lags = sorted({*FIRST_LAGS, *LONG_LAGS})
    lines_of = {
        task: {
            row: line for row in results.rows(task) if len(line := points_of(results, task, row, lags)) > 1
        }
        for task in TASKS
    }
    tasks = [task for task, lines in lines_of.items() if len(lines) >= LEAST_ROWS]
    figure, panels = plt.subplots(
        1, max(1, len(tasks)), figsize=(6.2 * max(1, len(tasks)), 4.6), layout="constrained", squeeze=False
    )
    for axes, task in zip(panels[0], tasks, strict=False):
        lines = lines_of[task]
        last = LONG_LAGS[0]
        ranked = sorted(
            lines, key=lambda row: -max((m.value for lag, m in lines[row] if lag == last), default=-1.0)
        )
        others = [row for row in ranked if row not in ALWAYS]
        colours = {"uncorrected": "black", "grpo": "tab:red"} | dict(zip(others[:3], COLOURS, strict=False))
        ends = []
        for row in ranked:
            if row not in colours:
                draw(axes, lags, lines[row], color="0.85", linewidth=1, zorder=1)
                continue
            # Intervals beside each other, because bands over each other hide the lines.
            shift = 0.05 * (list(colours).index(row) - 2)
            draw(axes, lags, lines[row], shift, bars=True, color=colours[row], linewidth=1.8, zorder=3)
            ends.append((lines[row][-1][1].value, row))
        ends.sort(reverse=True)
        for (_, row), height in zip(ends, apart([end for end, _ in ends], LABEL_GAP), strict=True):
            place = (1.015, height / TOP)
            label = f"{row} (ours)" if row in OWN else row
            axes.annotate(label, place, xycoords="axes fraction", color=colours[row], va="center", fontsize=9)
        axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axes.set(xlabel="forced policy lag, versions", ylim=(0, TOP))
        grey = len(ranked) - len(ends)
        axes.set_title(f"{task}; in grey: {grey} more" if grey else task, fontsize=10, loc="left")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("reward, mean over seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def draw(
    axes: Any,
    lags: Sequence[int],
    points: Sequence[tuple[int, Mean]],
    shift: float = 0.0,
    *,
    bars: bool = False,
    **style: Any,
) -> None:
    """Draw a row's line: dashed where runs get longer behind it, with a hollow point for fewer than three seeds."""
    for lag, mean in points if bars else ():
        low, high = mean.band
        filled = style["color"] if mean.half is not None else "white"
        axes.errorbar(
            [lags.index(lag) + shift],
            [mean.value],
            yerr=[[mean.value - low], [high - mean.value]],
            marker="o",
            markersize=4.5,
            markerfacecolor=filled,
            elinewidth=0.9,
            capsize=2,
            color=style["color"],
            zorder=style["zorder"] + 1,
        )
    for (lag, mean), (next_lag, after) in pairwise(points):
        longer = next_lag in LONG_LAGS
        x = [lags.index(lag) + shift, lags.index(next_lag) + shift]
        axes.plot(x, [mean.value, after.value], linestyle=(0, (3, 2)) if longer else "-", **style)


def points_of(results: Results, task: str, row: str, lags: Sequence[int]) -> list[tuple[int, Mean]]:
    """Return (lag, reward) of a row; that of the sweep where no seed was run."""
    found = []
    rate = results.rate(task, row)
    for lag in lags:
        mean = results.first(task, row, lag) if lag in FIRST_LAGS else results.long(task, row, lag, 4 * lag)
        if mean is None and rate is not None:
            swept_ = results.swept(task, row, lag, rate)
            mean = mean_of([] if swept_ is None else [swept_])
        if mean is not None:
            found.append((lag, mean))
    return found


def write(found: Sequence[Found], args: argparse.Namespace) -> None:
    """Write the JSON that the page is made from, and the figure."""
    # A recipe that has changed since is another row.
    results = Results(f for f in found if f.settings == settings_of(f.cell))
    pairs = agreement.known(args.agreement) or published(args.json).pairs
    tables = {
        "separation": f"{separation(results)}\n\n{noise(results)[0]}",
        "equal-rates": equal_table(results),
        "rewards": of_all_tasks(lambda task: reward_table(results, task)),
        "rates": of_all_tasks(lambda task: rate_table(results, task)),
        "large-lags": of_all_tasks(lambda task: long_table(results, task)),
        "batches": of_all_tasks(lambda task: number_table(results, task)),
        "along": "\n\n".join(f"**{task}**\n\n{along_table(results, task)}" for task in WHY_TASKS),
        "own": own_table(results),
        "agreement": agreement.table(pairs),
    }
    kept = [msgspec.to_builtins(msgspec.structs.replace(f, curve=[]), str_keys=True) for f in results.found]
    content = {
        "cells": [rounded(f) for f in kept],
        "pairs": rounded(msgspec.to_builtins(pairs)),
    }
    save_results(args.json, tables, content)
    if args.plot is not None:
        plot(results, args.plot)


def rounded(value: Any) -> Any:
    """Return numbers with four digits, and lists and tables of them.

    Example:
        >>> rounded({"a": [0.123456, 1], "b": None})
        {'a': [0.1235, 1], 'b': None}
    """
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
