"""``summary.json`` and the learning curve of a finished run. docs/run/summary.md explains the fields."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.run_file.sections import RunConfig
from launch.supervise.learning_curve import draw_curve
from learner.run_files import METRICS, RESULT, best_model, best_of, score_of

SCHEMA = 1
COUNTS = (
    "tokens_generated",
    "tokens_trained",
    "tokens_replayed",
    "trajectories_trained",
    "trajectories_by_outcome",
    "tokens_by_outcome",
    "episodes",
)
"""What the learner's report and the summary count alike."""
Summary = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """What the supervisor knows of a run that has ended."""

    ended_by: str
    wall_seconds: float
    """Seconds from this start to the end."""
    killed: list[str]
    """Processes that had to be killed at the end."""
    restarts: dict[str, int]
    """Number of restarts of each role."""
    restart_reasons: list[str]
    resumed: bool = False


def write_summary(config: RunConfig, folder: Path, course: Course) -> Summary:
    """Write and return the summary of the learner's report and metrics file, and draw the learning curve."""
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    lines = read_metrics(folder)
    deciding = next(iter(config.learner.evaluation_sets), "")
    curve = folder / "learning_curve.png"
    draw_curve(lines, result["evaluations"], curve, title=folder.name)
    summary: Summary = {
        "schema": SCHEMA,
        "run": folder.name,
        "method": config.method,
        "mode": config.run.mode,
        "seed": config.run.seed,
        "ended_by": course.ended_by,
        "steps": result["steps"],
        "policy_version": result["policy_version"],
        "parameters": result["parameters"],
        "wall_seconds": course.wall_seconds,
        "training_seconds": result["wall_seconds"],
        "resumed": course.resumed,
        **before_and_after(result["evaluations"]),
        "evaluations": result["evaluations"],
        "best": best_entry(result["evaluations"], deciding, folder, last=result["steps"]),
        **{name: result[name] for name in COUNTS},
        "policy_lag": {**result["policy_lag"], "bound": config.max_policy_lag},
        "idle_share": idle_shares(result, lines),
        "seconds": {name: result[f"{name}_seconds"] for name in ("wait", "update", "publish")},
        "skipped_steps": result["skipped_steps"],
        "restarts": course.restarts,
        "restart_reasons": course.restart_reasons,
        "killed_processes": course.killed,
        "tensorboard": str(folder / "tb"),
        "learning_curve": str(curve),
        "model": str(folder / "model"),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary


def before_and_after(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return accuracy and mean return of the unnamed set before and after training; None where nobody measured."""
    by_tag = {e["tag"]: e for e in of_set(evaluations, "")}
    before, after = by_tag.get("before", {}), by_tag.get("after", {})
    return {
        "accuracy": {
            "before": before.get("accuracy"),
            "after": after.get("accuracy"),
            "tasks": before.get("tasks", 0),
        },
        "held_out_return": {"before": before.get("return_mean"), "after": after.get("return_mean")},
    }


def idle_shares(result: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return which share of their time learner and generators had nothing to do.

    Args:
        result: the learner's report.
        lines: of the metrics file.
    """
    return {
        "learner": result["wait_seconds"] / max(1e-9, result["step_seconds"]),
        "generator": generator_idle_share([m for m in lines if "learner/policy_version" in m]),
    }


def of_set(evaluations: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the evaluations of one set; those of an earlier version are of the unnamed one.

    Example:
        >>> of_set([{"step": 0}, {"step": 0, "set": "hard"}, {"step": 9, "set": ""}], "")
        [{'step': 0}, {'step': 9, 'set': ''}]
    """
    return [dict(e) for e in evaluations if e.get("set", "") == name]


def best_entry(
    evaluations: Sequence[Mapping[str, Any]], name: str, folder: Path, *, last: int
) -> dict[str, Any] | None:
    """Return step, score and model of the best evaluation after the first step; None without one.

    Args:
        name: the set that decides.
        folder: run folder. The model is None if it was not kept.
        last: learner steps of the run.
    """
    best = best_of(evaluations, name)
    if best is None:
        return None
    kept = [
        best_model(folder, best["step"]),
        *([folder / "model"] if best["step"] == last else []),
    ]
    model = next((str(path) for path in kept if path.is_dir()), None)
    return {"step": best["step"], "score": score_of(best), "model": model}


def generator_idle_share(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the generators' serving time, from first to last step, without a running request.

    The counters begin again at 0 when a broker or a generator restarts; such a step back counts as nothing.

    Example:
        >>> idle, served = "generator/idle_seconds_total", "generator/serving_seconds_total"
        >>> generator_idle_share([{idle: 5.0, served: 20.0}, {}, {idle: 6.0, served: 30.0}])
        0.1
    """
    idle, served = (
        sum(max(0.0, after - before) for before, after in pairwise(m[name] for m in steps if name in m))
        for name in ("generator/idle_seconds_total", "generator/serving_seconds_total")
    )
    return idle / served if served else 0.0


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return all lines of ``metrics.jsonl``."""
    path = folder / METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
