"""The table of trajectories: filters, sorting, a histogram of rewards, groups whose returns are equal. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.errors import BadQuestion
from launch.run_file.sections import RunConfig
from launch.view.columns import (
    NONE,
    Mask,
    Places,
    RowColumns,
    evaluation_of,
    is_uniform,
    known_step,
    reward_of,
)
from launch.view.histograms import bin_edges, histogram
from launch.view.journal_index import JournalIndex, Row
from learner.samples import Sample

PAGE_ROWS = 200
BINS = 20
REASONS = 20
"""Most reasons of failures that are listed."""
TASKS = 20
"""Most held-out tasks that are listed."""


@dataclass(frozen=True)
class Filter:
    """What the table shows; an absent value does not filter."""

    reward_min: float | None = None
    reward_max: float | None = None
    reward_name: str | None = None
    """Name of the reward that the bounds are for; None: the weighted sum."""
    env: str | None = None
    purpose: str | None = None
    evaluation: str | None = None
    task: str | None = None
    """Number of a held-out task, or the name of any task."""
    group: str | None = None
    outcome: str | None = None
    status: str | None = None
    reason: str | None = None
    """Part of why the episode failed, or of why it ended."""
    lag_min: int | None = None
    step_min: int | None = None
    step_max: int | None = None
    version: int | None = None
    """A version that sampled some of its tokens."""
    length_min: int | None = None
    length_max: int | None = None
    correct: bool | None = None
    uniform: bool | None = None
    trajectory: str | None = None
    """Part of the trajectory's name."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "Filter":
        """Return the filter of the parameters of an address; other parameters are left alone.

        Raises:
            BadQuestion: a value is not of the right kind.

        Example:
            >>> Filter.of({"reward_min": "0.5", "correct": "false", "sort": "-reward"}).reward_min
            0.5
        """
        values: dict[str, Any] = {}
        for part in fields(cls):
            text = given.get(part.name, "")
            if not text:
                continue
            values[part.name] = _value(part.name, str(part.type).partition(" ")[0], text)
        return cls(**values)

    def places(self, index: JournalIndex, columns: RowColumns) -> Places:
        """Return the places of the rows that meet all conditions, the oldest first."""
        codes = columns.codes
        masks: list[Mask] = []

        def equal(name: str, value: str | None) -> None:
            if value is not None:
                masks.append(columns[name] == codes[name].known(value))

        def contains(name: str, part: str | None) -> None:
            if part is not None:
                masks.append(codes[name].where(lambda value: part in value)[columns[name]])

        def between(values: NDArray[Any], low: float | None, high: float | None) -> None:
            if low is not None:
                masks.append(values >= low)
            if high is not None:
                masks.append(values <= high)
            if (low, high) != (None, None):
                # NaN meets no bound by itself.
                masks.append(values != NONE)

        for name in ("group", "env", "purpose", "status", "evaluation"):
            equal(name, getattr(self, name))
        contains("reason", self.reason)
        contains("outcome", self.outcome)
        if self.correct is not None:
            masks.append(columns["correct"] == int(self.correct))
        if self.uniform is not None:
            masks.append(columns.uniform[columns["group"]] == self.uniform)
        between(columns["lag"], self.lag_min, None)
        between(columns["step"], self.step_min, self.step_max)
        between(columns["length"], self.length_min, self.length_max)
        if self.version is not None:
            masks += [columns["version_low"] <= self.version, columns["version_high"] >= self.version]
        if (self.reward_min, self.reward_max) != (None, None):
            named = self.reward_name is not None
            values = columns.named_reward(str(self.reward_name)) if named else columns["reward"]
            between(values, self.reward_min, self.reward_max)
        places = np.flatnonzero(np.logical_and.reduce(masks)) if masks else np.arange(columns.rows)
        # What arrays do not have is asked of the rows that are left.
        tests = self._tests()
        if tests:
            rows = index.rows
            places = np.array([i for i in places.tolist() if all(t(rows[i]) for t in tests)], np.intp)
        return places

    def _tests(self) -> list[Callable[[Row], bool]]:
        version, part, task = self.version, self.trajectory, self.task
        tests: list[tuple[bool, Callable[[Row], bool]]] = [
            (part is not None, lambda row: str(part) in row.trajectory),
            (task is not None, lambda row: task in (row.task, str((evaluation_of(row) or ("", -1))[1]))),
            (version is not None, lambda row: any(v == version for p in row.pieces for v, _ in p.versions)),
        ]
        return [test for wanted, test in tests if wanted]


def _value(name: str, kind: str, text: str) -> Any:
    try:
        match kind:
            case "float":
                value = float(text)
                if math.isnan(value):
                    raise ValueError
                return value
            case "int":
                return int(text[:20])
            case "bool":
                return {"true": True, "false": False}[text]
            case _:
                return text[:1_000]
    except (ValueError, KeyError):
        raise BadQuestion(f"{name} is {text[:40]!r}; it takes a value of kind {kind}") from None


SORTS = (
    "place", "reward", "step", "length", "tokens", "lag", "turns", "group", "trajectory", "version", "task",
)  # fmt: skip
"""What rows can be sorted by."""


def sorted_places(columns: RowColumns, places: Places, sort: str) -> Places:
    """Return places of rows in the order of a column; rows without a value come last, whatever the direction.

    Raises:
        BadQuestion: there is no such order.
    """
    name, down = sort.removeprefix("-"), sort.startswith("-")
    if name not in SORTS:
        raise BadQuestion(
            f"sort is {sort[:40]!r}; it takes one of {', '.join(SORTS)}, with - in front for the other way"
        )
    values: NDArray[Any]
    match name:
        case "place":
            return places[::-1] if down else places
        case "trajectory":
            values = columns.ranks()[places]
        case "group":
            codes = columns.codes["group"]
            ranks = np.empty(len(codes.values), np.int32)
            ranks[sorted(range(len(codes.values)), key=codes.values.__getitem__)] = np.arange(
                len(codes.values)
            )
            values = ranks[columns["group"][places]]
        case "task":
            # Training tasks have no number: they stand first, by step.
            order = np.lexsort([columns[key][places] for key in ("step", "number")])
            ranks = np.empty(len(order), np.int64)
            ranks[order] = np.arange(len(order))
            values = ranks
        case _:
            values = columns["version_high" if name == "version" else name][places]
    known = ~np.isnan(values) if values.dtype.kind == "f" else values != NONE
    some = np.flatnonzero(known)
    keys = values[some].astype(np.float64)
    order = np.argsort(-keys if down else keys, kind="stable")
    chosen: Places = places[np.concatenate([some[order], np.flatnonzero(~known)])]
    return chosen


def selected(index: JournalIndex, columns: RowColumns, given: Mapping[str, str]) -> Places:
    """Return the places of the rows that the parameters of an address select, sorted; the newest first by default.

    Raises:
        BadQuestion: a parameter has a value that it cannot have.
    """
    return sorted_places(columns, Filter.of(given).places(index, columns), given.get("sort", "") or "-place")


def table_page(
    index: JournalIndex,
    columns: RowColumns,
    config: RunConfig | None,
    samples: Sequence[Sample],
    given: Mapping[str, str],
) -> dict[str, Any]:
    """Return one page of the table, with the histogram of rewards of all rows that the filters select."""
    places = selected(index, columns, given)
    try:
        start = max(0, int(given.get("start", "0")[:12]))
    except ValueError:
        raise BadQuestion(f"start is {given['start'][:40]!r}; it takes a number") from None
    sampled = {(sample.task, sample.step) for sample in samples}
    shown = [index.rows[place] for place in places[start : start + PAGE_ROWS].tolist()]
    trained = places[columns["purpose"][places] == columns.codes["purpose"].known("train")]
    groups = np.unique(columns["group"][trained])
    return {
        "total": columns.rows,
        "selected": len(places),
        "start": start,
        "rows": [row_of(row, index, config, (row.task, row.step) in sampled) for row in shown],
        "failures": failures(index, columns, places),
        "worst": worst_tasks(index, columns, places),
        "equal_groups": int(columns.uniform[groups].sum()),
        "groups": len(groups),
        "histogram": reward_histogram(columns["reward"][places]),
    }


def failures(index: JournalIndex, columns: RowColumns, places: Places) -> list[dict[str, Any]]:
    """Return why episodes failed and how often, the most frequent reasons first, each with one of its trajectories."""
    failed = places[columns["status"][places] == columns.codes["status"].known("failed")]
    pairs = np.stack([columns["env"][failed], columns["reason"][failed]])
    found, first, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
    return [
        {
            "env": columns.codes["env"].values[found[0, i]],
            "reason": columns.codes["reason"].values[found[1, i]],
            "count": int(counts[i]),
            "trajectory": index.rows[failed[first[i]]].trajectory,
        }
        for i in np.lexsort([first, -counts])[:REASONS].tolist()
    ]


def worst_tasks(index: JournalIndex, columns: RowColumns, places: Places) -> list[dict[str, Any]]:
    """Return the held-out tasks with the lowest mean reward, each with its answers, how many solved it, and the newest.

    A failed answer has no reward, and counts as an answer.
    """
    places = places[columns["held_out"][places] != NONE]
    code, reward = columns["held_out"][places], columns["reward"][places]
    finite_reward = np.isfinite(reward)
    tasks = columns.codes["held_out"].values

    def count(mask: Mask, weights: NDArray[Any] | None = None) -> list[float]:
        chosen = None if weights is None else weights[mask]
        return [float(n) for n in np.bincount(code[mask], chosen, len(tasks))]

    answers = count(np.ones(len(places), np.bool_))
    failed = count(columns["status"][places] == columns.codes["status"].known("failed"))
    solved = count(columns["correct"][places] == 1)
    known, sums = count(finite_reward), count(finite_reward, reward)
    means = [total / n if n else None for total, n in zip(sums, known, strict=True)]
    worst = [i for i in range(len(tasks)) if solved[i] < answers[i]]
    worst.sort(key=lambda i: (solved[i] / answers[i], means[i] or 0.0, *tasks[i]))
    found = list[dict[str, Any]]()
    for i in worst[:TASKS]:
        of_task = [index.rows[place] for place in places[code == i].tolist()]
        newest = max(of_task, key=lambda row: (row.step, row.pieces[-1].at or 0.0))
        found.append(
            {
                "set": tasks[i][0],
                "task": tasks[i][1],
                "answers": int(answers[i]),
                "failed": int(failed[i]),
                "solved": int(solved[i]),
                "reward": means[i],
                "trajectory": newest.trajectory,
            }
        )
    return found


def row_of(row: Row, index: JournalIndex, config: RunConfig | None, sampled: bool = False) -> dict[str, Any]:
    """Return what the table shows of a trajectory."""
    evaluation = evaluation_of(row)
    return {
        "trajectory": row.trajectory,
        "task": row.task,
        "group": row.group,
        "env": row.env,
        "purpose": row.purpose,
        "evaluation": evaluation[0] if evaluation else None,
        "status": row.status,
        "reason": row.failure or row.stop_reason,
        "reward": finite(reward_of(row, config)),
        "rewards": {name: finite(value) for name, value in row.rewards.items()},
        "correct": row.correct,
        "step": known_step(row),
        "length": row.action_tokens,
        "tokens": row.tokens,
        "turns": row.turns,
        "versions": row.versions,
        "lag": row.lag,
        "outcome": row.outcome,
        "generator": row.generator,
        "uniform": is_uniform(index.groups.get(row.group, [])),
        "sampled": sampled,
        "at": row.pieces[-1].at if row.pieces else None,
    }


def finite(value: float | None) -> float | None:
    """Return a number, or None for one that is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None


def reward_histogram(rewards: NDArray[np.float64]) -> dict[str, Any]:
    """Return counts of rewards by bin, and how many rows have none."""
    known = rewards[np.isfinite(rewards)]
    if not len(known):
        return {"edges": [], "counts": [], "missing": len(rewards)}
    edges = bin_edges([float(known.min()), float(known.max())], BINS)
    return {"edges": edges, "counts": histogram(known, edges), "missing": len(rewards) - len(known)}


def choices(columns: RowColumns) -> dict[str, list[str]]:
    """Return the values that filters can take."""
    return {
        "env": sorted(columns.present("env"))[:200],
        "purpose": sorted(columns.present("purpose")),
        "status": sorted(columns.present("status")),
        "evaluation": columns.present("evaluation")[:500],
        "outcome": sorted(columns.present("outcome"))[:50],
        "reward_name": sorted(columns.reward_names)[:200],
    }
