"""Plots of `benchmarks.staleness`: reward over lag, and the learning curves of each recipe."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import pyplot
from launch.supervise.summary import apart


def cells(results: Sequence[dict[str, Any]], recipe: str, lag: int) -> dict[int, float]:
    """Return the score of each seed."""
    return {r["seed"]: r["score"] for r in results if r["recipe"] == recipe and r["lag"] == lag}


PLAIN = "grpo"
"""The plain recipe, with which the others are compared."""
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red")
"""Colours of the named recipes beside `PLAIN`: the best ones first."""
LABEL_GAP = 0.045
"""Least distance of two names at the right edge, as a share of the axis."""


def named(results: Sequence[dict[str, Any]], recipes: Sequence[str], lag: int) -> list[str]:
    """Return the recipes that the picture names: the two best and the two worst at this lag, best first.

    Example:
        >>> rows = [{"recipe": r, "lag": 8, "seed": 0, "score": s} for r, s in zip("abcdef", (3, 1, 6, 2, 5, 4))]
        >>> named(rows, "abcdef", 8)
        ['c', 'e', 'd', 'b']
    """
    scores = {r: list(cells(results, r, lag).values()) for r in recipes if r != PLAIN}
    ranked = sorted((r for r in scores if scores[r]), key=lambda r: -statistics.median(scores[r]))
    return ranked if len(ranked) <= len(COLOURS) else [*ranked[:2], *ranked[-2:]]


def plot(results: Sequence[dict[str, Any]], recipes: Sequence[str], lags: Sequence[int], path: Path) -> None:
    """Plot the reward over the lag. Five lines have a name at their end; the other recipes are grey.

    The bands of the named lines reach from the least to the greatest reward over the seeds.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colours = dict(zip(named(results, recipes, max(lags)), COLOURS, strict=False)) | {PLAIN: "black"}
    ends: list[tuple[float, str]] = []
    for recipe in recipes:
        points = [(lag, sorted(cells(results, recipe, lag).values())) for lag in lags]
        points = [(lag, values) for lag, values in points if values]
        if not points:
            continue
        x, y = [lag for lag, _ in points], [statistics.median(values) for _, values in points]
        if recipe not in colours:
            axes.plot(x, y, color="0.8", linewidth=1, zorder=1)
            continue
        axes.plot(x, y, color=colours[recipe], marker="o", markersize=4, linewidth=2, zorder=3)
        low, high = [values[0] for _, values in points], [values[-1] for _, values in points]
        axes.fill_between(x, low, high, color=colours[recipe], alpha=0.12, linewidth=0, zorder=2)
        ends.append((y[-1], recipe))
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(lags, [str(lag) for lag in lags])
    axes.set(xlabel="forced policy lag, versions", ylabel="reward after equally many updates", ylim=(0, 1.02))
    for (_, recipe), height in zip(ends, apart([end for end, _ in ends], LABEL_GAP), strict=True):
        label = f"{recipe} (plain)" if recipe == PLAIN else recipe
        axes.annotate(
            label,
            (1.015, height / 1.02),
            xycoords="axes fraction",
            color=colours[recipe],
            va="center",
            fontsize=9,
        )
    grey = sum(recipe not in colours for recipe in recipes)
    if grey:
        axes.set_title(f"in grey: the {grey} other recipes", fontsize=9, color="0.5", loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def curves(
    results: Sequence[dict[str, Any]], recipes: Sequence[str], lags: Sequence[int], folder: Path
) -> None:
    """Plot for each recipe the mean return of each version's batch: a line per lag, the median over seeds."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    colours = plt.get_cmap("viridis")
    for recipe in recipes:
        figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
        for i, lag in enumerate(lags):
            runs = [r["curve"] for r in results if r["recipe"] == recipe and r["lag"] == lag]
            if runs:
                median = [statistics.median(values) for values in zip(*runs, strict=True)]
                colour = colours(0.9 * i / max(1, len(lags) - 1))
                axes.plot(range(len(median)), median, color=colour, label=f"lag {lag}", linewidth=1.3)
        axes.set(xlabel="version that sampled the batch", ylabel="mean return", ylim=(0, 1.02))
        axes.set_title(recipe, fontsize=10)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        figure.savefig(folder / f"{recipe}.png", dpi=100)
        plt.close(figure)
