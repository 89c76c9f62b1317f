"""Rates from the metrics of the last run, for a plan without a calibration."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.plan.reading import fit
from launch.resuming import run_name
from launch.supervise.summary import read_metrics

LEAST_STEPS = 8
"""Steps that a run must have for its means to say something."""
WARM_UP_STEPS = 2
"""First steps, which are left out: they include the start."""

Line = Mapping[str, Any]


def last_run(runs: Path, name: str) -> Path | None:
    """Return the newest run folder of this run that has enough steps, or None."""
    folders = sorted(runs.glob(f"{name}*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((p for p in folders if run_name(p) == name and len(steps_of(p)) >= LEAST_STEPS), None)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the learner steps behind the warm-up; empty if the metrics cannot be read."""
    try:
        lines = read_metrics(folder)
    except (OSError, ValueError):
        return []
    return [line for line in lines if "learner/step_seconds" in line and "learner/policy_version" in line][
        WARM_UP_STEPS:
    ]


def rates_data(lines: Sequence[Line], *, generators: int, members: int) -> dict[str, Any]:
    """Return the content of a rates file, from means over the steps of a run.

    The roles shared the machine while they were measured, so nothing is added for that.

    Args:
        generators: generators of the run.
        members: trajectories that a step trains.

    Example:
        >>> line = {"generator/tokens_per_second": 300.0, "generator/running_requests": 60.0,
        ...     "generator/idle_share": 0.25, "learner/trained_tokens": 800.0, "learner/step_seconds": 2.0,
        ...     "learner/publish_seconds": 0.1, "rollout/turns_mean": 2.0, "rollout/length_mean_tokens": 8.0,
        ...     "actor/env_seconds": 0.2, "rollout/uniform_trajectories": 64.0}
        >>> data = rates_data([line] * 8, generators=1, members=32)
        >>> data["generator"]["decode"], data["learner"]["seconds_per_token"]
        ([{'sequences': 60.0, 'tokens_per_second': 400.0}], 0.0025)
        >>> data["episode"]["turn_tokens"], data["episode"]["filtered_groups"]
        (4.0, 0.2)
    """
    rate, running = _mean(lines, "generator/tokens_per_second"), _mean(lines, "generator/running_requests")
    active = max(0.05, 1.0 - _mean(lines, "generator/idle_share"))
    turns = max(1.0, _mean(lines, "rollout/turns_mean"))
    constant, slope = fit(
        [line["learner/trained_tokens"] for line in lines], [line["learner/step_seconds"] for line in lines]
    )
    uniform = max(line.get("rollout/uniform_trajectories", 0.0) for line in lines)
    point = {
        "sequences": max(1.0, round(running / generators, 2)),
        "tokens_per_second": max(0.01, round(rate / generators / active, 2)),
    }
    return {
        "generator": {
            "decode": [point],
            "pause_seconds": round(_mean(lines, "generator/update_pause_seconds"), 5),
        },
        "learner": {
            "step_seconds": constant,
            "seconds_per_token": slope,
            "publish_seconds": round(_mean(lines, "learner/publish_seconds"), 5),
        },
        "episode": {
            "turns": turns,
            "turn_tokens": max(1.0, round(_mean(lines, "rollout/length_mean_tokens") / turns, 2)),
            "tool_seconds": round(_mean(lines, "actor/env_seconds") / turns, 5),
            "filtered_groups": round(uniform / max(1.0, uniform + len(lines) * members), 4),
        },
    }


def _mean(lines: Sequence[Line], name: str) -> float:
    return statistics.fmean([float(line[name]) for line in lines if name in line] or [0.0])
