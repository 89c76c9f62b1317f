"""One run of an arm on the real system, and what is measured of it."""

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from benchmarks.claims.claims import Budget, BudgetUnit, Measure
from benchmarks.staleness.lag_parts import CountingExchange, lag_is_exact
from benchmarks.staleness.lag_system import System, learning
from benchmarks.staleness.program import fingerprint
from launch.run_file.sections import RunConfig
from learner.intake.evaluation import mean_rewards, share_correct
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
    """Whether each action token of each batch lagged as forced."""
    seconds: float
    unit: BudgetUnit = "tokens"
    """Unit of the run's budget."""

    @property
    def used(self) -> list[int]:
        """Tokens or steps of all batches up to each one, in the unit of the budget."""
        return [getattr(point, self.unit) for point in self.curve]


class PointExchange(CountingExchange):
    """An exchange that notes what each batch was like. Groups are not filtered, so a batch is all that was sampled."""

    def collect(self, *, step: int, version: int) -> list[Unit]:
        units = super().collect(step=step, version=version)
        self.points.append(next_point(self.points[-1] if self.points else Point(0, 0.0, 0.0), units))
        self.rewards = mean_rewards([t for unit in units for t in members_of(unit) if is_plain(t)])
        return units

    @cached_property
    def points(self) -> list[Point]:
        return []


def next_point(before: Point, units: Sequence[Unit]) -> Point:
    """Return what a batch was like, and what was used up with it."""
    sampled = [t for unit in units for t in members_of(unit)]
    plain = [t for t in sampled if is_plain(t)]
    calls = [m.value for t in plain for m in t.marks if m.name == "calls" and not isinstance(m.value, str)]
    return Point(
        tokens=before.tokens + sum(t.action_tokens for t in sampled),
        solved=(plain and share_correct(plain)) or 0.0,
        calls=sum(calls) / max(1, len(plain)),
        steps=before.steps + sum(t.action_turns for t in sampled),
        repeated=before.repeated + sum(map(repeated_steps, sampled)),
    )


def is_plain(t: Trajectory) -> bool:
    """Return whether a trajectory is of a group that was dealt out, so that it has no hint and no prefix."""
    return not names.stage_of(t.group_id)


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
    with learning(system, config, seed, exchange_class=PointExchange) as (learner, exchange):
        while not exchange.points or getattr(exchange.points[-1], budget.unit) < budget.amount:
            learner.learn()
    exact = lag_is_exact(exchange.lags_by_step, config.learner.forced_lag, learner.step)
    shutil.rmtree(learner.run_dir)
    return Cell(
        arm=arm,
        seed=seed,
        settings=settings_of(config, budget),
        curve=exchange.points,
        rewards=exchange.rewards,
        exact=exact,
        seconds=time.monotonic() - started,
        unit=budget.unit,
    )


def settings_of(config: RunConfig, budget: Budget) -> str:
    """Return a hash of all settings that a result depends on."""
    unit = "" if budget.unit == "tokens" else f" {budget.unit}"
    return hashlib.sha256(f"{fingerprint(config)} {budget.amount}{unit}".encode()).hexdigest()[:12]


def value_of(cell: Cell, measure: Measure) -> float:
    """Return one number of a run.

    Example:
        >>> curve = [Point(100, 0.0, 4.0), Point(200, 0.5, 3.0), Point(300, 1.0, 2.0)]
        >>> cell = Cell("grpo", 0, "", curve, {}, True, 1.0)
        >>> value_of(cell, "area"), value_of(cell, "final"), value_of(cell, "calls")
        (0.5, 1.0, 2.0)
    """
    if measure == "area":
        parts = zip(cell.used, [0, *cell.used[:-1]], cell.curve, strict=True)
        return sum((end - start) * point.solved for end, start, point in parts) / cell.used[-1]
    last = last_points(cell)
    return sum(point.solved if measure == "final" else point.calls for point in last) / len(last)


def last_points(cell: Cell) -> list[Point]:
    """Return the batches in the last fifth of the budget, at least one."""
    beyond = (1.0 - LAST) * cell.used[-1]
    return [point for point, used in zip(cell.curve, cell.used, strict=True) if used > beyond]


def cell_from(line: dict[str, Any]) -> Cell:
    """Return a run from a line of the file of finished runs."""
    return Cell(**{**line, "curve": [Point(*point) for point in line["curve"]]})
