"""Cells of the claims (one arm with one seed), what they say about a claim, and the tables and plots that show it."""

import hashlib
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.claims.claims import ARMS, BUDGETS, CLAIMS, Bar, Budget, BudgetUnit, Claim, Measure
from benchmarks.real_system import CountingSession, System, lag_is_exact, learning
from benchmarks.report import half_interval, pyplot, spread
from launch.run_file.sections import RunConfig
from learner.intake.evaluation import mean_rewards, share_correct
from learner.rewards import as_given, forced_mode, total_of
from learner.settings.advantages import GroupReward, ModesReward
from learner.trajectory import Trajectory, Unit
from protocol import names

LAST = 0.2
"""Share of the budget, at the end of a run, that "final" is about."""


class Point(NamedTuple):
    """One batch: what was sampled so far, and what its trajectories from the task's own prompt were like."""

    tokens: int
    """Action tokens of all batches up to this one."""
    solved: float
    """Share of the trajectories that solved their task."""
    calls: float
    """Mean number of tool calls."""
    steps: int = 0
    """Steps of the environment, of all batches up to this one, that the policy chose."""
    repeated: int = 0
    """Steps of the environment that branches repeated, which no policy chose again."""
    first: float = 0.0
    """Share of the trajectories behind the first of several instructions."""
    length: float = 0.0
    """Mean number of action tokens."""
    flawed: float = 0.0
    """Share of the right answers whose way was wrong, where the task says both."""


@dataclass(frozen=True)
class Cell:
    """One finished run."""

    arm: str
    seed: int
    settings: str
    """Hash of all settings. A table holds only runs of the present settings."""
    curve: list[Point]
    rewards: dict[str, float]
    """Mean rewards of the last batch, by name, as the environment gave them."""
    exact: bool
    """True if each action token of each batch lagged as forced."""
    seconds: float
    unit: BudgetUnit = "tokens"
    """Unit of the run's budget."""

    @property
    def used(self) -> list[int]:
        """Tokens or steps of all batches up to each one, in the unit of the budget."""
        return [getattr(point, self.unit) for point in self.curve]


class PointSession(CountingSession):
    """A session that notes what each batch was like. Groups are not filtered, so a batch is all that was sampled."""

    def collect(self, *, step: int, version: int) -> list[Unit]:
        units = super().collect(step=step, version=version)
        group = self.curriculum.config.reward.group
        before = self.points[-1] if self.points else Point(0, 0.0, 0.0)
        self.points.append(next_point(before, units, group))
        self.rewards = mean_rewards([t for unit in units for t in members_of(unit) if is_plain(t, group)])
        return units

    @cached_property
    def points(self) -> list[Point]:
        return []


def next_point(before: Point, units: Sequence[Unit], group: GroupReward | None = None) -> Point:
    """Return what a batch was like, and what was used up with it.

    Args:
        group: the reward of the group, which may force members into a mode.
    """
    sampled = [t for unit in units for t in members_of(unit)]
    plain = [t for t in sampled if is_plain(t, group)]
    calls = [m.value for t in plain for m in t.marks if m.name == "calls" and not isinstance(m.value, str)]
    return Point(
        tokens=before.tokens + sum(t.action_tokens for t in sampled),
        solved=(plain and share_correct(plain)) or 0.0,
        calls=sum(calls) / max(1, len(plain)),
        steps=before.steps + sum(t.action_turns for t in sampled),
        repeated=before.repeated + sum(map(repeated_steps, sampled)),
        first=sum(names.choice_of(t.group_id).instruction == 0 for t in plain) / max(1, len(plain)),
        length=sum(t.action_tokens for t in plain) / max(1, len(plain)),
        flawed=flawed_share(plain),
    )


def flawed_share(answers: Sequence[Trajectory]) -> float:
    """Return the share of the right answers whose way was wrong, by the rewards "right" and "working" of a task."""
    given = [as_given(t) for t in answers]
    right = [t for t in given if total_of(t, "right") > 0]
    return sum(total_of(t, "working") <= 0 for t in right) / max(1, len(right))


def is_plain(t: Trajectory, group: GroupReward | None = None) -> bool:
    """Return whether a trajectory is of a group that was dealt out, so that it has no hint and no prefix, and was not
    forced into a mode."""
    return not names.stage_of(t.group_id) and not (isinstance(group, ModesReward) and forced_mode(group, t))


def members_of(unit: Unit) -> list[Trajectory]:
    """Return all that was sampled for a unit, whether it is trained or not. Failed episodes are left out."""
    members = [t for part in unit.parts for ts in (part.trained, *part.dropped.values()) for t in ts]
    return [t for t in members if t.status != "failed"]


def repeated_steps(t: Trajectory) -> int:
    """Return how many actions of an earlier trajectory an episode repeated before its own first one."""
    first = next((turn.index for turn in t.turns if turn.action), 1)
    return first // 2 if t.parent else 0


def measure(system: System, config: RunConfig, arm: str, seed: int, budget: Budget) -> Cell:
    """Train an arm until its batches have used up the budget."""
    started = time.monotonic()
    with learning(system, config, seed, session_class=PointSession) as (run, session):
        while not session.points or getattr(session.points[-1], budget.unit) < budget.amount:
            run.learn()
    exact = lag_is_exact(session.lags_by_step, config.learner.forced_lag, run.trainer.step)
    shutil.rmtree(run.trainer.run_dir)
    return Cell(
        arm=arm,
        seed=seed,
        settings=settings_of(config, budget),
        curve=session.points,
        rewards=session.rewards,
        exact=exact,
        seconds=time.monotonic() - started,
        unit=budget.unit,
    )


def settings_of(config: RunConfig, budget: Budget) -> str:
    """Return a hash of all settings that a result depends on."""
    unit = "" if budget.unit == "tokens" else f" {budget.unit}"
    parts = (config.model, config.env, config.generator, config.learner)
    settings = hashlib.sha256("".join(part.model_dump_json() for part in parts).encode()).hexdigest()[:12]
    return hashlib.sha256(f"{settings} {budget.amount}{unit}".encode()).hexdigest()[:12]


def value_of(cell: Cell, measure: Measure) -> float:
    """Return one number of a run.

    Example:
        >>> curve = [Point(100, 0.0, 4.0), Point(200, 0.5, 3.0), Point(300, 1.0, 2.0)]
        >>> cell = Cell("grpo", 0, "", curve, {}, True, 1.0)
        >>> value_of(cell, "area"), value_of(cell, "final"), value_of(cell, "calls")
        (0.5, 1.0, 2.0)
        >>> value_of(Cell("grpo", 0, "", [Point(100, 0.5, 0.0, length=4.0)], {}, True, 1.0), "cost")
        8.0
    """
    if measure == "area":
        parts = zip(cell.used, [0, *cell.used[:-1]], cell.curve, strict=True)
        return sum((end - start) * point.solved for end, start, point in parts) / cell.used[-1]
    last = last_points(cell)
    if measure == "cost":
        return sum(point.length for point in last) / max(1e-9, sum(point.solved for point in last))
    return sum(float(getattr(point, OF_POINTS[measure])) for point in last) / len(last)


OF_POINTS: Mapping[Measure, str] = {"final": "solved", "calls": "calls", "first": "first", "flawed": "flawed"}
"""Measures that are means over batches, each with the number of a batch."""


def last_points(cell: Cell) -> list[Point]:
    """Return the batches in the last fifth of the budget, at least one."""
    beyond = (1.0 - LAST) * cell.used[-1]
    return [point for point, used in zip(cell.curve, cell.used, strict=True) if used > beyond]


def cell_from(line: dict[str, Any]) -> Cell:
    """Return a run from a line of the file of finished runs."""
    return Cell(**{**line, "curve": [Point(*point) for point in line["curve"]]})


ENOUGH_SEEDS = 5
"""Pairs that decide a claim."""

Verdict = Literal["holds", "did not help here", "not decided", "not measured"]


@dataclass(frozen=True)
class Difference:
    """Paired differences of two arms in one measure; above 0 the arm is better than the baseline."""

    values: tuple[float, ...]
    """One difference for each seed that both arms have, in the order of seeds."""
    own: tuple[float, ...] = ()
    """Value of the arm itself with each seed."""
    baseline: tuple[float, ...] = ()
    """Value of the baseline with each seed."""

    @property
    def median(self) -> float:
        """Median over seeds. Without a seed there is none, and asking raises StatisticsError."""
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean difference by Student's t; with one pair it has no end.

        Example:
            >>> low, high = Difference((0.1, 0.2, 0.3)).interval
            >>> round(low, 3), round(high, 3)
            (-0.048, 0.448)
        """
        n = len(self.values)
        if n < 2:
            return (-math.inf, math.inf)
        half = half_interval(self.values, 0.975)
        mean = statistics.fmean(self.values)
        return (mean - half, mean + half)


def difference(bar: Bar, treated: Mapping[int, Cell], baseline: Mapping[int, Cell]) -> Difference:
    """Return the paired differences of two arms, whose runs are given by seed.

    Of what costs it is the share that the arm saves, 1 - arm / baseline.
    """
    pairs = [(treated[seed], baseline[seed]) for seed in sorted(treated.keys() & baseline.keys())]
    own = tuple(value_of(a, bar.measure) for a, _ in pairs)
    theirs = tuple(value_of(b, bar.measure) for _, b in pairs)
    values = zip(own, theirs, strict=True)
    if bar.measure in SAVED:
        # A baseline without calls leaves nothing to save.
        return Difference(tuple(1.0 - a / b if b > 0 else 0.0 for a, b in values), own, theirs)
    return Difference(tuple(a - b for a, b in values), own, theirs)


def passes(bar: Bar, found: Difference) -> bool:
    """Return whether a difference reaches a bar.

    Example:
        >>> bar = Bar("final", "grpo", 0.1)
        >>> passes(bar, Difference((0.2, 0.2, 0.3))), passes(bar, Difference((0.2, 0.2, -0.3)))
        (True, False)
    """
    if bar.reach is not None and statistics.median(found.own) < bar.reach:
        return False
    if bar.below is not None and statistics.median(found.baseline) >= bar.below:
        return False
    return found.median >= bar.least and (not bar.better or found.interval[0] > 0)


def verdict(claim: Claim, found: Sequence[Difference]) -> Verdict:
    """Return the verdict on a claim from the differences of its bars.

    Example:
        >>> claim = Claim("X", "x", "", (Bar("final", "grpo", 0.1),), "")
        >>> [verdict(claim, [Difference((0.2,) * n)]) for n in (0, 2, 5)]
        ['not measured', 'not decided', 'holds']
    """
    pairs = min(len(one.values) for one in found)
    if pairs == 0:
        return "not measured"
    if pairs < ENOUGH_SEEDS:
        return "not decided"
    held = all(passes(bar, one) for bar, one in zip(claim.bars, found, strict=True))
    return "holds" if held else "did not help here"


WORDS: Mapping[Measure, str] = {
    "final": "solved, last fifth",
    "area": "solved, whole run",
    "calls": "calls saved",
    "first": "share of the first instruction, last fifth",
    "cost": "tokens per right answer saved",
    "flawed": "flawed right answers saved",
}
"""Measures in words."""
SAVED: tuple[Measure, ...] = ("calls", "cost", "flawed")
"""Measures of which less is better; a difference is the share that is saved."""
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
    """Return a difference as text: what is saved as percent, shares with three digits."""
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    return f"{value:+.0%}" if bar.measure in SAVED else f"{value:+.3f}"


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
    numbers = [
        spread([value_of(cell, measure) for cell in cells], 3) for measure in ("final", "area", "calls")
    ]
    if arm.task not in ("hops", "modes"):
        numbers[2] = "-"
    used = round(statistics.median(cell.used[-1] for cell in cells), -3)
    unit = BUDGETS[arm.task].unit
    return f"| {name} | {arm.task} | {recipe} | {' | '.join(numbers)} | {used:,.0f} {unit} | {len(cells)} |"


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
        >>> from benchmarks.claims.table import Point
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
