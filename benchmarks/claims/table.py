"""Tables and figure of `benchmarks.claims`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.claims.cells import Cell, value_of
from benchmarks.claims.claims import ARMS, BUDGETS, CLAIMS, Bar, Claim, Measure
from benchmarks.claims.verdicts import ENOUGH_SEEDS, Difference, difference, verdict
from benchmarks.report import pyplot

WORDS: Mapping[Measure, str] = {
    "final": "solved, last fifth",
    "area": "solved, whole run",
    "calls": "calls saved",
}
"""Measures in words."""
ALONE = ("| task | bar | paired difference | seeds | verdict |", "|---|---|---|---|---|")
"""Head of the table of one claim."""
PLOTTED = 40
"""Points of a curve in the figure."""


def by_arm(cells: Sequence[Cell]) -> dict[str, dict[int, Cell]]:
    """Return the runs of each arm by seed."""
    found: dict[str, dict[int, Cell]] = {name: {} for name in ARMS}
    for cell in cells:
        found[cell.arm][cell.seed] = cell
    return found


def tables(cells: Sequence[Cell], claims: Sequence[Claim] = CLAIMS) -> dict[str, str]:
    """Return the Markdown tables.

    "claims" has the verdicts, and "arms" the numbers of each arm. A table for each recipe has its claims alone.
    """
    runs = by_arm(cells)
    head = ["| method | claim | bar | paired difference | seeds | verdict |", "|---|---|---|---|---|---|"]
    rows = [f"| [{c.name}]({c.page}) | {c.sentence} | {_cells(c, runs)} |" for c in claims]
    alone: dict[str, list[str]] = {}
    for c in claims:
        row = f"| {ARMS[c.arm].task} | {_cells(c, runs)} |"
        alone.setdefault(ARMS[c.arm].recipe, [*ALONE]).append(row)
    arms = ["| arm | task | recipe | solved, last fifth | solved, whole run | calls | budget | runs |"]
    arms += ["|---|---|---|---|---|---|---|---|"]
    arms += [_arm_row(name, list(runs[name].values())) for name in ARMS if runs[name]]
    lines = {"claims": [*head, *rows], "arms": arms, **alone}
    return {name: "\n".join(table) for name, table in lines.items()}


def _cells(claim: Claim, runs: Mapping[str, Mapping[int, Cell]]) -> str:
    """Return the bar, the paired difference, the number of seeds and the verdict of a claim."""
    found = [difference(bar, runs[claim.arm], runs[bar.over]) for bar in claim.bars]
    seeds = min(len(one.values) for one in found)
    bars = "; ".join(_bar(bar) for bar in claim.bars)
    shown = "; ".join(_shown(bar, one) for bar, one in zip(claim.bars, found, strict=True))
    of = f"{seeds} of {ENOUGH_SEEDS}" if seeds < ENOUGH_SEEDS else str(seeds)
    return f"{bars} | {shown} | {of} | **{verdict(claim, found)}**"


def _bar(bar: Bar) -> str:
    text = f"{WORDS[bar.measure]} ≥ {_number(bar, bar.least)} over {bar.over}"
    text += "" if bar.reach is None else f", itself ≥ {bar.reach}"
    return text + ("" if bar.below is None else f", where {bar.over} has < {bar.below}")


def _number(bar: Bar, value: float) -> str:
    """Return a difference as text: calls as percent, shares with three digits."""
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    return f"{value:+.0%}" if bar.measure == "calls" else f"{value:+.3f}"


def _shown(bar: Bar, found: Difference) -> str:
    if not found.values:
        return "-"
    low, high = found.interval
    if len(found.values) == 1:
        return _number(bar, found.median)
    return f"{_number(bar, found.median)} [{_number(bar, low)}, {_number(bar, high)}]"


def _arm_row(name: str, cells: Sequence[Cell]) -> str:
    arm = ARMS[name]
    recipe = arm.recipe + (f", scale {arm.scale}" if arm.scale else "")
    recipe += "".join(f", {name} {value}" for name, value in arm.family.items() if name != "note")
    numbers = [_spread([value_of(cell, measure) for cell in cells]) for measure in ("final", "area", "calls")]
    if arm.task != "hops":
        numbers[2] = "-"
    used = round(statistics.median(cell.used[-1] for cell in cells), -3)
    unit = BUDGETS[arm.task].unit
    return f"| {name} | {arm.task} | {recipe} | {' | '.join(numbers)} | {used:,.0f} {unit} | {len(cells)} |"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Plot the solved share over the budget: one field for each measured claim, the median over seeds."""
    plt, runs = pyplot(), by_arm(cells)
    shown = [claim for claim in CLAIMS if runs[claim.arm]]
    columns = max(1, min(3, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure, fields = plt.subplots(
        rows, columns, figsize=(4 * columns, 2.8 * rows), squeeze=False, layout="constrained"
    )
    for axes in fields.flat[len(shown) :]:
        axes.axis("off")
    for claim, axes in zip(shown, fields.flat, strict=False):
        for name in (claim.arm, *dict.fromkeys(bar.over for bar in claim.bars)):
            curves = [smoothed(cell) for cell in runs[name].values()]
            if curves:
                middle = [statistics.median(values) for values in zip(*curves, strict=True)]
                last = statistics.median(cell.used[-1] for cell in runs[name].values())
                x = [last * (i + 0.5) / PLOTTED / 1000 for i in range(PLOTTED)]
                axes.plot(x, middle, label=name, linewidth=2 if name == claim.arm else 1.2)
        unit = {"tokens": "sampled tokens", "steps": "steps"}[BUDGETS[ARMS[claim.arm].task].unit]
        axes.set(title=claim.name, xlabel=f"thousand {unit}", ylabel="solved", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def smoothed(cell: Cell) -> list[float]:
    """Return the solved share in `PLOTTED` equal parts of the budget; a part without a batch has that of the next one.

    Example:
        >>> from benchmarks.claims.cells import Point
        >>> curve = [Point(100, 0.0, 0.0), Point(200, 1.0, 0.0)]
        >>> values = smoothed(Cell("grpo", 0, "", curve, {}, True, 1.0))
        >>> values[0], values[19], values[20], values[-1]
        (0.0, 0.0, 1.0, 1.0)
    """
    points = list(zip(cell.used, cell.curve, strict=True))
    width = cell.used[-1] / PLOTTED
    values = []
    for i in range(PLOTTED):
        inside = [point.solved for used, point in points if i * width < used <= (i + 1) * width]
        following = next(point.solved for used, point in points if used > i * width)
        values.append(statistics.fmean(inside) if inside else following)
    return values
