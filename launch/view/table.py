"""The table of trajectories: filters, sorting, a histogram of rewards, groups whose returns are equal. Pure."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from launch.errors import BadQuestion
from launch.run_file.sections import RunConfig
from launch.view.histograms import bin_edges, histogram
from launch.view.journal_index import JournalIndex, Row
from learner.samples import Sample

PAGE_ROWS = 200
BINS = 20
REASONS = 20
"""Most reasons of failures that are listed."""
TASKS = 20
"""Most held-out tasks that are listed."""
_EVALUATION = re.compile(r"(\d+)eval-(.*)-(\d+)")
_WHEN = re.compile(r" ?\b(before|after|step \d+)( \d+)?$")
"""When an evaluation was: the end of its tag, behind the name of the set."""


def evaluation_of(row: Row) -> tuple[str, int] | None:
    """Return tag and number of a held-out task; None for a training task.

    Example:
        >>> evaluation_of(Row("1eval-hard step 20-5.0", "1eval-hard step 20-5", "", 1, "e", "eval", "", 0.0))
        ('hard step 20', 5)
    """
    match = _EVALUATION.fullmatch(row.task) if row.purpose == "eval" else None
    return (match[2], int(match[3])) if match else None


def held_out_task(row: Row) -> tuple[str, int] | None:
    """Return set and number of a held-out task, which are the same in each evaluation; None for a training task.

    Example:
        >>> held_out_task(Row("1eval-hard step 20 20-5.0", "1eval-hard step 20 20-5", "", 1, "e", "eval", "", 0.0))
        ('hard', 5)
        >>> held_out_task(Row("1eval-after 4-7.0", "1eval-after 4-7", "", 1, "e", "eval", "", 0.0))
        ('', 7)
    """
    found = evaluation_of(row)
    return None if found is None else (_WHEN.sub("", found[0]), found[1])


def reward_of(row: Row, config: RunConfig | None) -> float | None:
    """Return the weighted sum of a trajectory's rewards; None if it has none, or failed. See `rewards_by`."""
    return rewards_by(config)(row)


def rewards_by(config: RunConfig | None) -> Callable[[Row], float | None]:
    """Return the function from a trajectory to its weighted sum of rewards.

    The weights are those of `[learner.reward.weights]` after all stages. What else the section does is not applied, so
    the sum can differ from the return that the learner trained on; samples have that.
    """
    weights = config.learner.reward.weights_in_force if config is not None else {}

    def reward(row: Row) -> float | None:
        rewards = row.rewards
        if not rewards or row.status == "failed":
            return None
        if not weights:
            return sum(rewards.values())
        return sum(weights.get(name, 1.0) * value for name, value in rewards.items())

    return reward


def known_step(row: Row) -> int | None:
    """Return the learner step that took a trajectory; None while none did."""
    return row.step if row.step >= 0 else None


def is_uniform(members: Sequence[Row]) -> bool:
    """Return whether a group has ended, and all its members have the same rewards, so that it teaches nothing.

    Example:
        >>> def row(reward):
        ...     rewards = {"r": reward}
        ...     return Row("t", "t", "g", 2, "e", "train", "", 1.0, status="finished", rewards=rewards)
        >>> is_uniform([row(1.0), row(1.0)]), is_uniform([row(1.0), row(0.0)]), is_uniform([row(1.0)])
        (True, False, False)
    """
    ended = [row for row in members if row.status not in ("unfinished", "failed")]
    return (
        len(ended) > 1
        and len(ended) >= members[0].group_size
        and all(r.rewards == ended[0].rewards for r in ended)
    )


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

    def tests(self, index: JournalIndex, config: RunConfig | None) -> list[Callable[[Row], bool]]:
        """Return the conditions that a row has to meet."""
        uniform = (
            {group for group, rows in index.groups.items() if is_uniform(rows)}
            if self.uniform is not None
            else set()
        )

        weighted, name = rewards_by(config), self.reward_name

        def reward(row: Row) -> float | None:
            return weighted(row) if name is None else row.rewards.get(name)

        def between(low: float | None, high: float | None, value: float | None) -> bool:
            return value is not None and (low is None or value >= low) and (high is None or value <= high)

        tests: list[tuple[bool, Callable[[Row], bool]]] = [
            (self.trajectory is not None, lambda row: str(self.trajectory) in row.trajectory),
            (self.group is not None, lambda row: row.group == self.group),
            (self.env is not None, lambda row: row.env == self.env),
            (self.purpose is not None, lambda row: row.purpose == self.purpose),
            (self.status is not None, lambda row: row.status == self.status),
            (self.correct is not None, lambda row: row.correct is self.correct),
            (self.reason is not None, lambda row: str(self.reason) in (row.failure or row.stop_reason)),
            (self.evaluation is not None, lambda row: (evaluation_of(row) or ("", 0))[0] == self.evaluation),
            (
                self.task is not None,
                lambda row: self.task in (row.task, str((evaluation_of(row) or ("", -1))[1])),
            ),
            (self.uniform is not None, lambda row: (row.group in uniform) is self.uniform),
            (self.outcome is not None, lambda row: str(self.outcome) in row.outcome),
            (self.lag_min is not None, lambda row: between(self.lag_min, None, row.lag)),
            (
                self.step_min is not None or self.step_max is not None,
                lambda row: between(self.step_min, self.step_max, known_step(row)),
            ),
            (
                self.length_min is not None or self.length_max is not None,
                lambda row: between(self.length_min, self.length_max, row.action_tokens),
            ),
            (
                self.version is not None,
                lambda row: any(
                    version == self.version for piece in row.pieces for version, _ in piece.versions
                ),
            ),
            (
                self.reward_min is not None or self.reward_max is not None,
                lambda row: between(self.reward_min, self.reward_max, reward(row)),
            ),
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


def sort_keys(config: RunConfig | None) -> dict[str, Callable[[Row], Any]]:
    """Return what rows can be sorted by; None of a row is a missing value."""
    return {
        "place": lambda row: 0,
        "reward": rewards_by(config),
        "step": known_step,
        "length": lambda row: row.action_tokens,
        "tokens": lambda row: row.tokens,
        "lag": lambda row: row.lag,
        "turns": lambda row: row.turns,
        "group": lambda row: row.group,
        "trajectory": lambda row: row.trajectory,
        "version": lambda row: (row.versions or (None,))[-1],
        "task": lambda row: ((evaluation_of(row) or ("", -1))[1], row.step, row.task),
    }


def selected(index: JournalIndex, config: RunConfig | None, given: Mapping[str, str]) -> list[Row]:
    """Return the rows that the parameters of an address select, sorted; the newest first if they say nothing.

    Raises:
        BadQuestion: a parameter has a value that it cannot have.
    """
    rows = index.rows
    tests = Filter.of(given).tests(index, config)
    if tests:
        rows = [row for row in rows if all(test(row) for test in tests)]
    sort = given.get("sort", "") or "-place"
    keys = sort_keys(config)
    key = keys.get(sort.removeprefix("-"))
    if key is None:
        raise BadQuestion(
            f"sort is {sort[:40]!r}; it takes one of {', '.join(keys)}, with - in front for the other way"
        )
    down = sort.startswith("-")
    if sort.removeprefix("-") == "place":
        return list(reversed(rows)) if down else list(rows)
    # Missing values come last, whatever the direction.
    values = [key(row) for row in rows]
    known = [place for place, value in enumerate(values) if value is not None]
    known.sort(key=values.__getitem__, reverse=down)
    missing = [row for row, value in zip(rows, values, strict=True) if value is None]
    return [rows[place] for place in known] + missing


def table_page(
    index: JournalIndex, config: RunConfig | None, samples: Sequence[Sample], given: Mapping[str, str]
) -> dict[str, Any]:
    """Return one page of the table, with the histogram of rewards of all rows that the filters select."""
    rows = selected(index, config, given)
    try:
        start = max(0, int(given.get("start", "0")[:12]))
    except ValueError:
        raise BadQuestion(f"start is {given['start'][:40]!r}; it takes a number") from None
    sampled = {(sample.task, sample.step) for sample in samples}
    reward = rewards_by(config)
    groups = {row.group for row in rows if row.purpose == "train"}
    return {
        "total": len(index.rows),
        "selected": len(rows),
        "start": start,
        "rows": [
            row_of(row, index, config, (row.task, row.step) in sampled)
            for row in rows[start : start + PAGE_ROWS]
        ],
        "failures": failures(rows),
        "worst": worst_tasks(rows, config),
        "equal_groups": sum(is_uniform(index.groups.get(group, [])) for group in groups),
        "groups": len(groups),
        "histogram": reward_histogram([reward(row) for row in rows]),
    }


def failures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return why episodes failed and how often, the most frequent reasons first, each with one of its trajectories."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status == "failed":
            found.setdefault((row.env, row.failure or row.stop_reason), []).append(row)
    most = sorted(found.items(), key=lambda pair: -len(pair[1]))[:REASONS]
    return [
        {"env": env, "reason": reason, "count": len(of_reason), "trajectory": of_reason[0].trajectory}
        for (env, reason), of_reason in most
    ]


def worst_tasks(rows: Sequence[Row], config: RunConfig | None) -> list[dict[str, Any]]:
    """Return the held-out tasks with the lowest mean reward, each with its answers, how many solved it, and the newest.

    A failed answer has no reward, and counts as an answer.
    """
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.purpose == "eval" and (task := held_out_task(row)) is not None:
            found.setdefault(task, []).append(row)
    reward = rewards_by(config)
    worst = list[dict[str, Any]]()
    for (of_set, number), answers in found.items():
        known = [value for row in answers if (value := finite(reward(row))) is not None]
        worst.append(
            {
                "set": of_set,
                "task": number,
                "answers": len(answers),
                "failed": sum(row.status == "failed" for row in answers),
                "solved": sum(row.correct is True for row in answers),
                "reward": sum(known) / len(known) if known else None,
                "trajectory": max(answers, key=lambda row: (row.step, row.pieces[-1].at or 0.0)).trajectory,
            }
        )
    worst.sort(
        key=lambda one: (one["solved"] / one["answers"], one["reward"] or 0.0, one["set"], one["task"])
    )
    return [one for one in worst if one["solved"] < one["answers"]][:TASKS]


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


def reward_histogram(rewards: Sequence[float | None]) -> dict[str, Any]:
    """Return counts of rewards by bin, and how many rows have none."""
    known = [value for value in rewards if value is not None and math.isfinite(value)]
    if not known:
        return {"edges": [], "counts": [], "missing": len(rewards)}
    edges = bin_edges(known, BINS)
    return {"edges": edges, "counts": histogram(known, edges), "missing": len(rewards) - len(known)}


def choices(index: JournalIndex) -> dict[str, list[str]]:
    """Return the values that filters can take."""
    rows = index.rows
    tags = [found[0] for row in rows if row.purpose == "eval" and (found := evaluation_of(row)) is not None]
    return {
        "env": sorted({row.env for row in rows})[:200],
        "purpose": sorted({row.purpose for row in rows}),
        "status": sorted({row.status for row in rows}),
        "evaluation": list(dict.fromkeys(tags))[:500],
        "outcome": sorted({row.outcome for row in rows})[:50],
        "reward_name": sorted({name for row in rows for name in row.rewards})[:200],
    }
