"""Who waited for whom: rows of roles over the wall clock, and one batch with a bar for each of its trajectories. Pure.

Bars end at the broker's time of arrival and go back by the durations that the actor measured, so a host whose clock is
wrong cannot bend the picture.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from launch.view.journal_index import JournalIndex, Row
from launch.view.overview import evaluations, number
from launch.view.run_reader import Columns, RunFiles

MAX_STEPS = 600
MAX_BARS = 400
PARTS = {"wait": "wait", "update": "step", "publish": "publish", "gpu_wait": "gpu_wait"}
"""What the learner does, and the metric `learner/METRIC_seconds` that measures it."""
COLUMNS = (
    *(f"learner/{metric}_seconds" for metric in PARTS.values()),
    "actor/env_seconds",
    "actor/episodes_running",
    "actor/segments_waiting",
    "generator/idle_share",
    "generator/policy_version",
    "generator/running_requests",
    "generator/tokens_per_second",
    "generator/update_pause_seconds",
    "generator/waiting_requests",
    "learner/idle_share",
    "learner/policy_version",
    "step",
    "time",
)
Times = Callable[[Row], Sequence[dict[str, Any]]]
"""Returns the seconds of each turn of a trajectory, see `launch.view.inspector.turn_times`."""


def timeline_page(files: RunFiles, index: JournalIndex) -> dict[str, Any]:
    """Return for each of the newest steps where the time of learner, generators and actors went.

    Without a wall clock in the metrics, the steps stand one behind the other by their own durations.
    """
    steps = files.steps
    places = range(max(0, steps.rows - MAX_STEPS), steps.rows)
    clock = steps.last("time") is not None
    at, rows = 0.0, []
    evaluated = evaluations(files.evaluations)
    stood = [one["stood"] for one in evaluated if one["stood"] is not None]
    # Of a column that no row has, one is made for all steps.
    columns = {name: steps[name] for name in COLUMNS}
    for i in places:
        parts = {name: number(columns[f"learner/{metric}_seconds"][i]) for name, metric in PARTS.items()}
        whole = sum(value or 0.0 for value in parts.values())
        ended = number(columns["time"][i]) if clock else at + whole
        at += whole
        rows.append(
            {
                "step": number(columns["step"][i]),
                "ended": ended,
                "version": number(columns["learner/policy_version"][i]),
                **parts,
                "idle": number(columns["learner/idle_share"][i]),
                "generators": {
                    "version": number(columns["generator/policy_version"][i]),
                    "idle": number(columns["generator/idle_share"][i]),
                    "pause": number(columns["generator/update_pause_seconds"][i]),
                    "running": number(columns["generator/running_requests"][i]),
                    "waiting": number(columns["generator/waiting_requests"][i]),
                    "tokens_per_second": number(columns["generator/tokens_per_second"][i]),
                },
                "actors": {
                    "episodes": number(columns["actor/episodes_running"][i]),
                    "env_seconds": number(columns["actor/env_seconds"][i]),
                    "segments_waiting": number(columns["actor/segments_waiting"][i]),
                },
            }
        )
    return {
        "clock": clock,
        "steps": rows,
        "evaluations": [
            {name: one[name] for name in ("set", "step", "at", "stood")}
            for one in evaluated
            if one["at"] is not None
        ],
        "generators": by_generator(index),
        "restarts": restarts(files),
        "first_wait": number(steps["learner/wait_seconds"][0]) if steps.rows else None,
        "totals": totals(steps) | {"evaluate": sum(stood) if stood else None},
        "turns": dict(index.turn_seconds) if any(index.turn_seconds.values()) else None,
        "arrivals": any(row.pieces[-1].at is not None for row in index.rows[-50:] if row.pieces),
    }


def totals(steps: Columns) -> dict[str, float | None]:
    """Return the learner's seconds by what it did, over all steps."""
    found: dict[str, float | None] = {}
    for name, metric in PARTS.items():
        known = [value for value in steps[f"learner/{metric}_seconds"] if not math.isnan(value)]
        found[name] = sum(known) if known else None
    return found


def by_generator(index: JournalIndex) -> list[dict[str, Any]]:
    """Return for each generator its trajectories and action tokens, and by arrival its versions in service."""
    found: dict[str, dict[str, Any]] = {}
    for row in index.rows:
        entry = found.setdefault(
            row.generator, {"name": row.generator, "trajectories": 0, "tokens": 0, "spans": []}
        )
        entry["trajectories"] += 1
        entry["tokens"] += row.action_tokens
        for piece in row.pieces:
            if piece.at is None or not piece.versions:
                continue
            version, spans = piece.versions[-1][0], entry["spans"]
            if spans and spans[-1]["version"] >= version:
                spans[-1]["to"] = max(spans[-1]["to"], piece.at)
            elif len(spans) < MAX_STEPS:
                spans.append({"version": version, "from": piece.at, "to": piece.at})
    return list(found.values())


def restarts(files: RunFiles) -> list[dict[str, Any]]:
    """Return when processes ended and were started again, as far as the supervisor noted it."""
    return [
        {"process": process.name, "at": ending.get("time"), "reason": str(ending.get("reason", ""))}
        for process in files.processes
        for ending in process.endings
    ]


def batch_page(files: RunFiles, index: JournalIndex, step: int, times: Times) -> dict[str, Any]:
    """Return the trajectories of a learner step, the last arrivals first.

    A bar begins at the arrival of the last segment, less all seconds of its turns. Without turn times it goes from the
    first segment's arrival to the last one's.

    Args:
        step: learner step, counted from 1.
        times: reads the seconds of a trajectory's turns.
    """
    rows = [
        row
        for row in index.rows
        if any(piece.step == step and piece.outcome == "trained" for piece in row.pieces)
    ]
    rows.sort(key=lambda row: row.pieces[-1].at or 0.0, reverse=True)
    commit = next((commit for commit in reversed(index.commits) if commit.step == step), None)
    bars = [_bar(row, index, times(row)) for row in rows[:MAX_BARS]]
    known = [bar["seconds"] for bar in bars if bar["seconds"] is not None]
    return {
        "step": step,
        "trained_version": None if commit is None or commit.version < 0 else commit.version,
        "taken": None if commit is None else commit.at,
        "bars": bars,
        "left_out": max(0, len(rows) - MAX_BARS),
        "clock": any(bar["ended"] is not None for bar in bars),
        "timed": bool(known),
        "share_tools": _share(bars, "tools"),
        "share_waiting": _share(bars, "waited"),
        "steps": sorted({commit.step for commit in index.commits if commit.version >= 0})[-2_000:],
    }


def _bar(row: Row, index: JournalIndex, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ended = row.pieces[-1].at
    seconds = sum(turn["waited"] + turn["sampled"] + turn["tools"] for turn in turns) if turns else None
    began = None if ended is None else ended - seconds if seconds is not None else row.pieces[0].at
    unit = next((name for name in (row.group, row.trajectory) if name in index.delivered), None)
    return {
        "trajectory": row.trajectory,
        "group": row.group,
        "length": row.action_tokens,
        "turns": list(turns),
        "began": began,
        "ended": ended,
        "seconds": seconds,
        "delivered": None if unit is None else index.delivered[unit],
        "versions": row.versions,
        "lag": row.lag,
        "generator": row.generator,
    }


def _share(bars: Sequence[dict[str, Any]], part: str) -> float | None:
    whole = sum(bar["seconds"] or 0.0 for bar in bars)
    return sum(turn[part] for bar in bars for turn in bar["turns"]) / whole if whole else None
