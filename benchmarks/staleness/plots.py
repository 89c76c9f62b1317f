"""Plots of `benchmarks.staleness`: reward over lag, and the learning curves of each recipe."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import pyplot


def cells(results: Sequence[dict[str, Any]], recipe: str, lag: int) -> dict[int, float]:
    """Return the score of each seed."""
    return {r["seed"]: r["score"] for r in results if r["recipe"] == recipe and r["lag"] == lag}


def plot(results: Sequence[dict[str, Any]], recipes: Sequence[str], lags: Sequence[int], path: Path) -> None:
    """Plot the reward over the lag, with one line per recipe. Plain GRPO is black."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5))
    colours = plt.get_cmap("tab20")
    for i, recipe in enumerate(recipes):
        points = [(lag, list(cells(results, recipe, lag).values())) for lag in lags]
        points = [(lag, values) for lag, values in points if values]
        if not points:
            continue
        x, y = [lag for lag, _ in points], [statistics.median(values) for _, values in points]
        plain = recipe == "grpo"
        axes.plot(
            x, y, marker="o", markersize=4, label=recipe, color="black" if plain else colours(i % 20),
            linewidth=3 if plain else 1.5, zorder=3 if plain else 2,
        )  # fmt: skip
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(lags, [str(lag) for lag in lags])
    axes.set(xlabel="forced policy lag, versions", ylabel="reward after equally many updates", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(ncols=1, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
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
