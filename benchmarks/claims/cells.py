"""One run of an arm on the real system, and what is measured of it."""

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from benchmarks.claims.claims import Measure
from benchmarks.staleness.lag_system import CountingExchange, System, lag_is_exact, learning
from benchmarks.staleness.program import fingerprint
from launch.run_file.sections import RunConfig
from learner.intake.evaluation import mean_rewards, share_correct
from learner.units import Unit

LAST = 0.2
"""Share of the tokens, at the end of a run, that "final" is about."""


class Point(NamedTuple):
    """One batch: what was sampled so far, and what the trajectories of the batch were like."""

    tokens: int
    """Action tokens of all batches up to this one."""
    solved: float
    """Share of the trajectories that solved their task."""
    calls: float
    """Mean number of tool calls."""


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


class PointExchange(CountingExchange):
    """An exchange that notes what each batch was like. Groups are not filtered, so a batch is all that was sampled."""

    def collect(self, *, step: int, version: int) -> list[Unit]:
        groups = super().collect(step=step, version=version)
        batch = [t for group in groups for t in group.trajectories if t.status != "failed"]
        tokens = self.points[-1].tokens if self.points else 0
        calls = [
            m.value for t in batch for m in t.marks if m.name == "calls" and not isinstance(m.value, str)
        ]
        self.points.append(
            Point(
                tokens + sum(t.action_tokens for t in batch),
                share_correct(batch) or 0.0,
                sum(calls) / max(1, len(batch)),
            )
        )
        self.rewards = mean_rewards(batch)
        return groups

    @cached_property
    def points(self) -> list[Point]:
        return []


def measure(system: System, config: RunConfig, arm: str, seed: int, tokens: int) -> Cell:
    """Train an arm until its batches have ``tokens`` action tokens."""
    started = time.monotonic()
    with learning(system, config, seed, exchange_class=PointExchange) as (learner, exchange):
        while not exchange.points or exchange.points[-1].tokens < tokens:
            learner.learn()
    exact = lag_is_exact(exchange.lags_by_step, config.learner.forced_lag, learner.step)
    shutil.rmtree(learner.run_dir)
    return Cell(
        arm=arm,
        seed=seed,
        settings=settings_of(config, tokens),
        curve=exchange.points,
        rewards=exchange.rewards,
        exact=exact,
        seconds=time.monotonic() - started,
    )


def settings_of(config: RunConfig, tokens: int) -> str:
    """Return a hash of all settings that a result depends on."""
    return hashlib.sha256(f"{fingerprint(config)} {tokens}".encode()).hexdigest()[:12]


def value_of(cell: Cell, measure: Measure) -> float:
    """Return one number of a run.

    Example:
        >>> curve = [Point(100, 0.0, 4.0), Point(200, 0.5, 3.0), Point(300, 1.0, 2.0)]
        >>> cell = Cell("grpo", 0, "", curve, {}, True, 1.0)
        >>> value_of(cell, "area"), value_of(cell, "final"), value_of(cell, "calls")
        (0.5, 1.0, 2.0)
    """
    curve = cell.curve
    if measure == "area":
        before = [0, *(point.tokens for point in curve[:-1])]
        parts = [(point.tokens - start, point.solved) for point, start in zip(curve, before, strict=True)]
        return sum(tokens * solved for tokens, solved in parts) / sum(tokens for tokens, _ in parts)
    last = last_points(curve)
    return sum(point.solved if measure == "final" else point.calls for point in last) / len(last)


def last_points(curve: Sequence[Point]) -> list[Point]:
    """Return the batches in the last fifth of the tokens, at least one."""
    return [point for point in curve if point.tokens > (1.0 - LAST) * curve[-1].tokens]


def cell_from(line: dict[str, Any]) -> Cell:
    """Return a run from a line of the file of finished runs."""
    return Cell(**{**line, "curve": [Point(*point) for point in line["curve"]]})
