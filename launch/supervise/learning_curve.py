"""Draws the learning curve of a run: moving means with the raw values behind, and evaluations as points."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from launch.supervise.terminal.metrics_tail import SMOOTHED_STEPS

SETS = (("black", "D"), ("tab:purple", "s"), ("tab:brown", "^"), ("tab:olive", "v"), ("tab:cyan", "o"))
"""Colours and markers of evaluation sets; further sets take them again."""
CURVES = (
    ("rollout/return_mean", "return, sampled", "tab:blue"),
    ("rollout/correct_share", "solved, sampled", "tab:green"),
)
"""Metric, name in the picture, and colour."""
MANY_STEPS = 2 * SMOOTHED_STEPS
"""Steps from which on raw values are drawn as a faint band behind their mean; fewer are points."""


def moving_mean(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the last `SMOOTHED_STEPS` values up to it.

    Example:
        >>> moving_mean([1.0, 3.0, 5.0])
        [1.0, 2.0, 3.0]
    """
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def standard_error(evaluation: Mapping[str, Any]) -> float:
    """Return the standard error of an accuracy; 0 if the number of answered tasks is not known.

    Several answers to a task count as one, because they are not independent. So the result is rather too large.

    Example:
        >>> standard_error({"accuracy": 0.5, "answered": 100, "tasks": 100})
        0.05
        >>> standard_error({"accuracy": 0.5, "answered": 400, "tasks": 100, "samples": 4})
        0.05
    """
    p, n = evaluation["accuracy"], evaluation.get("answered", 0) / evaluation.get("samples", 1)
    return math.sqrt(p * (1 - p) / n) if n else 0.0


def draw_curve(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], path: Path, *, title: str
) -> None:
    """Plot return, share of right answers, held-out results and policy lag against the learner step.

    Names stand at the ends of their lines. Evaluations are points with their value, and no line joins them,
    because nobody measured between them. Each named set has a marker and a colour of its own.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    ends = []
    for name, label, colour in CURVES:
        steps, values = _points(lines, name)
        if not steps:
            continue
        means = moving_mean(values)
        top.plot(steps, means, color=colour, linewidth=2, zorder=3)
        style = {"linewidth": 0.6} if len(steps) >= MANY_STEPS else {"linestyle": "", "marker": "."}
        top.plot(steps, values, color=colour, alpha=0.25, zorder=1, **style)
        ends.append((means[-1], label, colour))
    sets = dict.fromkeys(e.get("set", "") for e in evaluations)
    for name, (colour, marker) in zip(sets, cycle(SETS), strict=False):
        ends += _held_out(top, [e for e in evaluations if e.get("set", "") == name], name, colour, marker)
    low, high = top.get_ylim()
    for height, (_, label, colour) in zip(
        apart([end[0] for end in ends], 0.06 * (high - low)), ends, strict=True
    ):
        place = (1.01, height)
        top.annotate(label, place, xycoords=("axes fraction", "data"), color=colour, va="center", fontsize=9)
    top.set_title(f"{title}: means over {SMOOTHED_STEPS} steps, single steps faint", loc="left", fontsize=10)
    top.set_ylabel("return, share solved" if len(ends) > 1 else "return")
    _lag(bottom, lines)
    bottom.set_ylabel("policy lag")
    bottom.set_xlabel("learner step")
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _held_out(
    axes: Any, evaluations: Sequence[Mapping[str, Any]], name: str, colour: str, marker: str
) -> list[tuple[float, str, str]]:
    """Draw a set's evaluations as points. Return height, name and colour of the label at their end, if there is any."""
    solved = any(e["accuracy"] is not None for e in evaluations)
    figure = "accuracy" if solved else "return_mean"
    shown = [e for e in evaluations if e[figure] is not None]
    if not shown:
        return []
    # An evaluation at the last step and the one after training have the same place; the later one counts.
    shown = list({e["step"]: e for e in shown}.values())
    errors = [standard_error(e) if solved else 0.0 for e in shown]
    steps, values = [e["step"] for e in shown], [e[figure] for e in shown]
    axes.errorbar(steps, values, errors, fmt=marker, color=colour, markersize=5, capsize=3, zorder=4)
    for i in sorted({0, len(shown) - 1}):
        axes.annotate(
            f"{values[i]:.2f}", (steps[i], values[i] + errors[i]), xytext=(0, 5), textcoords="offset points",
            ha="center", fontsize=9, color=colour, fontweight="bold",
        )  # fmt: skip
    what = "solved" if solved else "return"
    return [(values[-1], f"{name}: {what}" if name else f"held-out {what}, greedy", colour)]


def _lag(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw moving mean and moving maximum of the lag: a line, and the upper edge of an area."""
    steps, largest = _points(lines, "learner/policy_lag_max_versions")
    if steps:
        area = [max(largest[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(largest) + 1)]
        axes.fill_between(steps, area, color="0.85", linewidth=0, step="mid", label="largest")
    steps, means = _points(lines, "learner/policy_lag_mean_versions")
    if steps:
        axes.plot(steps, moving_mean(means), color="tab:red", linewidth=1.5, label="mean")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a metric, of the lines that have it."""
    rows = [m for m in lines if name in m]
    return [m["step"] for m in rows], [m[name] for m in rows]


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights, in the given order, moved so that neighbours have at least this distance.

    Example:
        >>> apart([0.5, 0.5, 0.9], 0.1)
        [0.45, 0.55, 0.9]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[list[float]] = []
    # A block is its middle and its number of names; blocks that overlap become one.
    for i in order:
        blocks.append([heights[i], 1])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            (high, m), (low, n) = blocks.pop(), blocks.pop()
            blocks.append([(high * m + low * n) / (m + n), m + n])
    moved = [middle + gap * (i - (n - 1) / 2) for middle, n in blocks for i in range(int(n))]
    places = dict(zip(order, moved, strict=True))
    return [round(places[i], 9) for i in range(len(heights))]
