"""Tasks, rows and settings of the frontier's cells."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import Struct

from launch.run_file.load import METHODS_FOLDER, check, load
from launch.run_file.sections import RunConfig
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.update.adaptive import optimizer_steps_per_update

LENGTH = 8
"""Characters of an answer."""
TASKS: dict[str, dict[str, Any]] = {
    "budget": {"name": "benchmarks/envs/budgets.py:BudgetSuite", "params": {"length": LENGTH, "limit": 6}},
    "neighbours": {"name": "benchmarks/envs/neighbours.py:NeighbourSuite", "params": {"length": LENGTH}},
    "letters": {"name": "benchmarks/envs/letters.py:LetterSuite", "params": {"length": LENGTH}},
    "corridor": {"name": "benchmarks/envs/corridor.py:CorridorSuite", "params": {"rooms": 3, "doors": 3}},
}
"""Environments by the name of the task."""
SAMPLING = {"corridor": {"max_turn_tokens": 2, "max_trajectory_tokens": 24}}
"""Limits of tokens, of the tasks that differ from `BASE`."""
BASE: dict[str, Any] = {
    "run": {"name": "frontier", "dir": "build/frontier", "mode": "sync", "max_minutes": 600.0},
    "model": {
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "layers": 1,
            "heads": 2,
            "head_dim": 32,
            "tie_embeddings": True,
            "warm_start": {"steps": 100, "demonstrations": 64, "batch": 16, "lr": 1e-3},
        },
        "cache": "build/models",
    },
    "generator": {"max_model_len": 32, "max_num_seqs": 64, "kv_cache_mb": 64, "stream_interval": 64},
    "actor": {"concurrent_episodes": 64, "segment_tokens": 64},
    "learner": {
        "group_size": 8,
        "batch_trajectories": 32,
        "max_policy_lag": 0,
        "evaluation_tasks": 64,
        "filter_uniform_groups": False,
        "sampling": {"max_turn_tokens": LENGTH, "max_trajectory_tokens": 16},
        "optimizer": {"lr": 1e-3, "max_grad_norm": 1.0},
    },
}
RATE = 1e-3
"""Learning rate that a cell's rate multiplies."""
RATES = (0.25, 1.0, 4.0)
"""Rates that each row is tried with."""
FIXED_RATES = {"corridor": 1.0}
"""Tasks whose rows all have one rate. On `corridor` a sweep on one seed chooses badly: at the rate 4 it saw runs that
find the way, and runs of other seeds find nothing even without lag."""
LEAST_STEPS = 128
CHECKED_AT = (128, 256)
"""Steps after which longer runs are scored, too."""
SWEPT_LAGS, SWEEP_SEED = (0, 16), 9
"""Lags of the sweep of rates, and its seed, which no reported cell has."""
FIRST_LAGS, FIRST_SEEDS = (0, 4, 16), (0, 1, 2)
LONG_LAGS, LONG_SEEDS = (64, 128), (0, 1, 2, 3, 4)
BEST = 6
"""Rows of the second stage beside `ALWAYS`."""
ALWAYS = ("uncorrected", "grpo")
WHY_ROWS = ("uncorrected", "cispo", "grpo", "gspo", "m2po", "dppo", "mdpo")
"""Rows whose batches are looked at along the run."""
WHY_TASKS = ("corridor", "budget")
WHY_RATE = 1.0


@dataclass(frozen=True)
class Own:
    """A rule of our own, which is no recipe."""

    base: str
    """Recipe from which it differs."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """Settings of the objective that differ."""
    rate_by_lag: float = 0.0
    """c of a learning rate divided by 1 + c times the lag."""
    fresh_groups: int = 0
    """Rollout groups of a batch that the version to be trained has sampled itself; the others lag as forced."""


FADED = {"kind": "benchmarks/frontier/rules.py:faded"}
OWN: dict[str, Own] = {
    "own-normalised": Own(
        "uncorrected",
        {"corrections": [{"kind": "benchmarks/frontier/rules.py:normalised", "ceiling": 2.0}]},
    ),
    "own-slower": Own("uncorrected", rate_by_lag=0.1),
    "own-faded": Own("uncorrected", {"corrections": [FADED]}),
    "own-faded-always": Own("uncorrected", {"corrections": [FADED | {"least": 64.0}]}),
    "own-faded-dppo": Own("dppo", {"corrections": [FADED]}),
    "own-faded-mdpo": Own("mdpo", {"corrections": [FADED]}),
    "own-anchored": Own("dppo", fresh_groups=1),
    "own-narrowing": Own("dppo", {"surrogate": {"kind": "benchmarks/frontier/rules.py:narrowing"}}),
}
"""Rules of our own, by the name of their row."""


def rows() -> list[str]:
    """Return all rows: the recipes for stale tokens, and the rules of our own."""
    return [*sorted(path.stem for path in METHODS_FOLDER.glob("*.toml")), *OWN]


@dataclass(frozen=True, order=True)
class Cell:
    """One run of a row."""

    task: str
    row: str
    lag: int
    seed: int
    rate: float
    """Factor of `RATE`."""
    steps: int = LEAST_STEPS
    again: int = 0
    """A further seed of the sampling alone."""

    @property
    def checked_at(self) -> list[int]:
        """Steps of shorter runs that are scored, too."""
        return [step for step in CHECKED_AT if step < self.steps]


def algorithm_of(row: str) -> tuple[AlgorithmConfig, LearnerConfig]:
    """Return the objective of a row, and the settings of its recipe."""
    own = OWN.get(row)
    theirs = load(Path(row if own is None else own.base)).learner
    if own is None:
        return theirs.algorithm, theirs
    given = theirs.algorithm.model_dump(mode="json", exclude_unset=True) | own.algorithm
    return AlgorithmConfig.model_validate_json(json.dumps(given)), theirs


def config_of(cell: Cell) -> RunConfig:
    """Return the settings of a cell.

    A recipe contributes its objective, its replay table and, where it has no groups, the group size of 1. Where it
    takes several optimizer steps on a batch, the rate is divided by their number, so that all rows have one budget.
    """
    algorithm, theirs = algorithm_of(cell.row)
    replay = theirs.replay
    if replay is not None:
        # Replayed tokens are older by the forced lag.
        replay = replay.model_copy(update={"max_policy_lag": replay.max_policy_lag + cell.lag})
    tiny = BASE["model"]["tiny"] | {"seed": cell.seed}
    sampling = SAMPLING.get(cell.task, BASE["learner"]["sampling"])
    settings = BASE | {
        "env": TASKS[cell.task],
        "model": BASE["model"] | {"tiny": tiny},
        "learner": BASE["learner"] | {"steps": cell.steps, "sampling": sampling},
    }
    config = check(settings, "benchmarks/frontier/cells.py")
    learner = config.learner
    lr = RATE * cell.rate / optimizer_steps_per_update(algorithm)
    changes = {
        "algorithm": algorithm,
        "replay": replay,
        "forced_lag": cell.lag,
        "group_size": 1 if theirs.group_size == 1 else learner.group_size,
        "optimizer": learner.optimizer.model_copy(update={"lr": lr}),
    }
    return config.model_copy(update={"learner": learner.model_copy(update=changes)})


def settings_of(cell: Cell) -> str:
    """Return a hash of all settings that a cell depends on, without those that have their defaults.

    So a field that a later version adds does not make a result old.
    """
    config = config_of(cell)
    parts = (config.model, config.env, config.learner)
    text = "".join(part.model_dump_json(exclude_defaults=True) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Found(Struct, frozen=True):
    """A finished cell, as a line of a file."""

    task: str
    row: str
    lag: int
    seed: int
    rate: float
    steps: int
    again: int
    settings: str
    """Hash of all settings, see `settings_of`."""
    score: float | None
    """Mean return in the last quarter of the run, see `loop.SCORED`; None if the run did not come to its end."""
    error: str = ""
    """Why it did not."""
    scores: dict[int, float] = {}
    last: float | None = None
    start: float = 0.0
    curve: list[float] = []
    course: list[dict[str, float]] = []
    """What the row did to its batches along the run, see `loop.CellResult.course`."""
    numbers: dict[str, float] = {}
    entropies: list[float] = []
    cosine: float | None = None
    turned: float | None = None
    exact: bool = False
    optimizer_steps: int = 0
    seconds: float = 0.0
    date: str = ""
    commit: str = ""

    @property
    def cell(self) -> Cell:
        """What was measured."""
        return Cell(self.task, self.row, self.lag, self.seed, self.rate, self.steps, self.again)


def chosen_rate(found: Iterable[Found], task: str, row: str) -> float | None:
    """Return the rate with the best mean over the lags of the sweep; None if no rate has them all.

    A run that did not come to its end counts as 0. A task of `FIXED_RATES` has its rate, without a sweep.

    Example:
        >>> swept = [Found("t", "r", lag, SWEEP_SEED, rate, 128, 0, "", score)
        ...     for lag, rate, score in
        ...     [(0, .25, .5), (16, .25, .5), (0, 1., .9), (16, 1., .4), (0, 4., 1.), (16, 4., None)]]
        >>> chosen_rate(swept, "t", "r"), chosen_rate(swept[:3], "t", "r"), chosen_rate([], "t", "r")
        (1.0, 0.25, None)
    """
    if task in FIXED_RATES:
        return FIXED_RATES[task]
    scores = {
        (f.rate, f.lag): f.score or 0.0 for f in found if (f.task, f.row, f.seed) == (task, row, SWEEP_SEED)
    }
    whole = [rate for rate in RATES if all((rate, lag) in scores for lag in SWEPT_LAGS)]
    return max(whole, key=lambda rate: sum(scores[rate, lag] for lag in SWEPT_LAGS), default=None)


def usual_rate(row: str) -> float:
    """Return the rate at which a row's optimizer steps are nearest to `RATE`; its sweep begins with it."""
    steps = optimizer_steps_per_update(algorithm_of(row)[0])
    return min(RATES, key=lambda rate: abs(rate - steps))


def first_stage(found: Sequence[Found], task: str, chosen: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of the first stage: the sweeps of all rows, then seed by seed at the rates that they have chosen.

    An early end leaves fewer seeds of all rows.
    """
    usual = {row: usual_rate(row) for row in chosen}
    for first in (True, False) if task not in FIXED_RATES else ():
        for row, rate, lag in product(chosen, RATES, SWEPT_LAGS):
            if (rate == usual[row]) == first:
                yield Cell(task, row, lag, SWEEP_SEED, rate)
    rates = {row: chosen_rate(found, task, row) for row in chosen}
    for seed, row, lag in product(FIRST_SEEDS, chosen, FIRST_LAGS):
        if (best := rates[row]) is not None:
            yield Cell(task, row, lag, seed, best)


def best_rows(found: Sequence[Found], task: str) -> list[str]:
    """Return the rows of the second stage: `ALWAYS`, and the `BEST` others by their score at the largest first lag."""
    scores: dict[str, list[float]] = {}
    for f in found:
        if (
            f.task == task
            and f.lag == max(FIRST_LAGS)
            and f.seed in FIRST_SEEDS
            and not f.again
            and f.row not in ALWAYS
        ):
            scores.setdefault(f.row, []).append(f.score or 0.0)
    ranked = sorted(scores, key=lambda row: -fmean(scores[row]))
    return [*ALWAYS, *ranked[:BEST]]


def second_stage(found: Sequence[Found], task: str, chosen: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of the second stage, each beside one without lag and with as many steps.

    An early end leaves fewer seeds of all rows, and fewer of the larger lag. The seeds that the first stage does not
    have come last, at its lags.
    """
    pairs = sorted(product(LONG_SEEDS, LONG_LAGS), key=lambda pair: pair[0] + 2 * LONG_LAGS.index(pair[1]))
    for (seed, lag), row in product(pairs, chosen):
        rate = chosen_rate(found, task, row)
        if rate is not None:
            for which in (lag, 0):
                yield Cell(task, row, which, seed, rate, steps=4 * lag)
    for seed, row, lag in product(LONG_SEEDS, chosen, FIRST_LAGS):
        rate = chosen_rate(found, task, row)
        if rate is not None:
            yield Cell(task, row, lag, seed, rate)


def why(tasks: Sequence[str], chosen: Sequence[str]) -> Iterator[Cell]:
    """Yield cells whose batches are looked at along the run, with one rate for all rows; the largest lag last."""
    for lag, seed, task, row in product((64, *FIRST_LAGS, 128), FIRST_SEEDS[:1], tasks, chosen):
        yield Cell(task, row, lag, seed, WHY_RATE, steps=max(LEAST_STEPS, 4 * lag))


def equal_rates(task: str, chosen: Sequence[str]) -> Iterator[Cell]:
    """Yield cells at the first large lag in which all rows have one rate, whatever their sweeps have chosen.

    An early end leaves out the greater rate.
    """
    lag = LONG_LAGS[0]
    for rate, seed, row, which in product(RATES[1:], FIRST_SEEDS, chosen, (lag, 0)):
        yield Cell(task, row, which, seed, rate, steps=4 * lag)


def repeated(found: Sequence[Found], task: str) -> Iterator[Cell]:
    """Yield the cells of the noise floor: the uncorrected row again, with other samples."""
    rate = chosen_rate(found, task, ALWAYS[0])
    if rate is not None:
        for seed, lag in product(FIRST_SEEDS, FIRST_LAGS):
            yield Cell(task, ALWAYS[0], lag, seed, rate, again=1)
