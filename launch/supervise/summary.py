"""``summary.json`` of a finished run, its learning curve, and the table at the end.

docs/run/summary.md explains the fields.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from launch.model_card import write_cards
from launch.run_file.sections import RunConfig
from launch.supervise.progress import SMOOTHED_STEPS, episodes_row, percent
from learner.run_files import METRICS, RESULT, best_model, best_of, score_of
from learner.trajectory import RECOMMITTED
from protocol.files import write_whole

log = logging.getLogger(__name__)

SETS = (("black", "D"), ("tab:purple", "s"), ("tab:brown", "^"), ("tab:olive", "v"), ("tab:cyan", "o"))
"""Colours and markers of evaluation sets; further sets take them again."""
CURVES = (
    ("rollout/return_mean", "return, sampled", "tab:blue"),
    ("rollout/correct_share", "solved, sampled", "tab:green"),
)
"""Metric, name in the picture, and colour."""
MANY_STEPS = 2 * SMOOTHED_STEPS
"""Steps from which on raw values are drawn as a faint band behind their mean; fewer are points."""


def moving_mean(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the last `SMOOTHED_STEPS` values up to it.

    Example:
        >>> moving_mean([1.0, 3.0, 5.0])
        [1.0, 2.0, 3.0]
    """
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def standard_error(evaluation: Mapping[str, Any]) -> float:
    """Return the standard error of an accuracy; 0 if the number of answered tasks is not known.

    Several answers to a task count as one, because they are not independent. So the result is rather too large.

    Example:
        >>> standard_error({"accuracy": 0.5, "answered": 100, "tasks": 100})
        0.05
        >>> standard_error({"accuracy": 0.5, "answered": 400, "tasks": 100, "samples": 4})
        0.05
    """
    p, n = evaluation["accuracy"], evaluation.get("answered", 0) / evaluation.get("samples", 1)
    return math.sqrt(p * (1 - p) / n) if n else 0.0


def draw_curve(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], path: Path, *, title: str
) -> None:
    """Plot return, share of right answers, held-out results and policy lag against the learner step.

    Names stand at the ends of their lines. Evaluations are points with their value, and no line joins them,
    because nobody measured between them. Each named set has a marker and a colour of its own. The title says
    what the bars are.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    ends, drawn = [], []
    for name, label, colour in CURVES:
        steps, values = _points(lines, name)
        if not steps:
            continue
        means = moving_mean(values)
        # A line that lies on another one is dashed, so that both are seen.
        dashes = "--" if (steps, means) in drawn else "-"
        drawn.append((steps, means))
        top.plot(steps, means, color=colour, linewidth=2, linestyle=dashes, zorder=3, label=label)
        style = {"linewidth": 0.6} if len(steps) >= MANY_STEPS else {"linestyle": "", "marker": "."}
        top.plot(steps, values, color=colour, alpha=0.25, zorder=1, **style)
        ends.append((means[-1], label, colour))
    sets = dict.fromkeys(e.get("set", "") for e in evaluations)
    for name, (colour, marker) in zip(sets, cycle(SETS), strict=False):
        ends += _held_out(top, [e for e in evaluations if e.get("set", "") == name], name, colour, marker)
    low, high = top.get_ylim()
    for height, (_, label, colour) in zip(
        apart([end[0] for end in ends], 0.06 * (high - low)), ends, strict=True
    ):
        place = (1.01, height)
        top.annotate(label, place, xycoords=("axes fraction", "data"), color=colour, va="center", fontsize=9)
    said = [f"{title}: means over {SMOOTHED_STEPS} steps, single steps faint"] if drawn else [title]
    said += ["bars: one standard error"] if any(e["accuracy"] is not None for e in evaluations) else []
    top.set_title("; ".join(said), loc="left", fontsize=10)
    top.set_ylabel("return, share solved" if len(ends) > 1 else "return")
    _lag(bottom, lines)
    bottom.set_ylabel("policy lag")
    bottom.set_xlabel("learner step")
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _held_out(
    axes: Any, evaluations: Sequence[Mapping[str, Any]], name: str, colour: str, marker: str
) -> list[tuple[float, str, str]]:
    """Draw a set's evaluations as points. Return height, name and colour of the label at their end, if there is any."""
    solved = any(e["accuracy"] is not None for e in evaluations)
    figure = "accuracy" if solved else "return_mean"
    shown = [e for e in evaluations if e[figure] is not None]
    if not shown:
        return []
    # An evaluation at the last step and the one after training have the same place; the later one counts.
    shown = list({e["step"]: e for e in shown}.values())
    errors = [standard_error(e) if solved else 0.0 for e in shown]
    steps, values = [e["step"] for e in shown], [e[figure] for e in shown]
    axes.errorbar(steps, values, errors, fmt=marker, color=colour, markersize=5, capsize=3, zorder=4)
    for i in sorted({0, len(shown) - 1}):
        axes.annotate(
            f"{values[i]:.2f}", (steps[i], values[i] + errors[i]), xytext=(0, 5), textcoords="offset points",
            ha="center", fontsize=9, color=colour, fontweight="bold",
        )  # fmt: skip
    what = "solved" if solved else "return"
    return [(values[-1], f"{name}: {what}" if name else f"held-out {what}, greedy", colour)]


def _lag(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw moving mean and moving maximum of the lag: a line, and the upper edge of an area."""
    steps, largest = _points(lines, "learner/policy_lag_max_versions")
    if steps:
        area = [max(largest[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(largest) + 1)]
        axes.fill_between(steps, area, color="0.85", linewidth=0, step="mid", label="largest")
    steps, means = _points(lines, "learner/policy_lag_mean_versions")
    if steps:
        axes.plot(steps, moving_mean(means), color="tab:red", linewidth=1.5, label="mean")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a metric, of the lines that have it."""
    rows = [m for m in lines if name in m]
    return [m["step"] for m in rows], [m[name] for m in rows]


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Spread the labels' heights, in the given order, at least this far apart.

    Example:
        >>> apart([0.5, 0.5, 0.9], 0.1)
        [0.45, 0.55, 0.9]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[list[float]] = []
    # A block is its middle and its number of names; blocks that overlap become one.
    for i in order:
        blocks.append([heights[i], 1])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            (high, m), (low, n) = blocks.pop(), blocks.pop()
            blocks.append([(high * m + low * n) / (m + n), m + n])
    moved = [middle + gap * (i - (n - 1) / 2) for middle, n in blocks for i in range(int(n))]
    places = dict(zip(order, moved, strict=True))
    return [round(places[i], 9) for i in range(len(heights))]


SCHEMA = 1
COUNTS = (
    "tokens_generated",
    "tokens_trained",
    "tokens_replayed",
    "tokens_given",
    "trajectories_trained",
    "trajectories_by_outcome",
    "tokens_by_outcome",
    "episodes",
)
"""Counts that the learner's report and the summary share."""
Summary = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """Facts that the supervisor has of a run that has ended."""

    ended_by: str
    wall_seconds: float
    """Seconds from this start to the end."""
    killed: list[str]
    """Processes that had to be killed at the end."""
    restarts: dict[str, int]
    """Number of restarts of each role."""
    restart_reasons: list[str]
    resumed: bool = False


def write_summary(
    config: RunConfig, folder: Path, course: Course, note: Callable[[str], None] = log.warning
) -> Summary:
    """Write and return the summary of the learner's report and metrics file, and then draw the learning curve.

    A file that cannot be written, for example on a full disk, is a remark: the run is done.

    Args:
        note: takes the remark.
    """
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    lines = read_metrics(folder)
    deciding = next(iter(config.learner.evaluation_sets), "")
    curve = folder / "learning_curve.png"
    summary: Summary = {
        "schema": SCHEMA,
        "run": folder.name,
        "method": config.method,
        "mode": config.run.mode,
        "seed": config.run.seed,
        "ended_by": course.ended_by,
        "then": result.get("run", "over"),
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
        "tensorboard": str(folder / "tb") if "tensorboard" in config.run.trackers else None,
        "learning_curve": str(curve),
        "model": str(folder / "model"),
    }
    try:
        _write(summary, folder)
    except OSError as error:
        note(f"summary.json could not be written ({error}); {folder / RESULT} has the learner's part of it")
    try:
        write_cards(config, folder, summary)
    except OSError as error:
        note(f"a model card could not be written ({error}); the run itself is done")
    try:
        draw_curve(lines, result["evaluations"], curve, title=folder.name)
    except (OSError, ImportError) as error:
        # A picture of no bytes would look like a run without data.
        curve.unlink(missing_ok=True)
        summary["learning_curve"] = None
        with contextlib.suppress(OSError):
            _write(summary, folder)
        lacks = "; it needs matplotlib: pip install '.[plot]'" if isinstance(error, ImportError) else ""
        note(f"the learning curve could not be drawn ({error}{lacks}); the run itself is done")
    return summary


def _write(summary: Summary, folder: Path) -> None:
    write_whole(folder / "summary.json", json.dumps(summary, indent=1))


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


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of the table: the parts of a summary that a person wants to see."""
    lag, idle = summary["policy_lag"], summary["idle_share"]
    return [
        # A summary of an earlier version names no method.
        *([("method", str(summary["method"]))] if summary.get("method") else []),
        *held_out_rows(summary["evaluations"]),
        *best_rows(summary),
        ("steps, policy version", f"{summary['steps']}, {summary['policy_version']} ({summary['ended_by']})"),
        ("wall time", wall_time(summary)),
        (
            "tokens",
            f"{summary['tokens_generated']:,} sampled, {summary['tokens_trained']:,} trained"
            # A run of an earlier version has no such count.
            + (f", {given:,} given" if (given := summary.get("tokens_given")) else ""),
        ),
        # A summary of an earlier version has no episodes.
        *([("episodes", episodes_row(summary["episodes"]))] if "episodes" in summary else []),
        ("not trained", not_trained(summary["trajectories_by_outcome"], summary["trajectories_trained"])),
        (
            "policy lag",
            f"mean {lag['mean_versions']:.2f}, max {lag['max_versions']} versions (bound {lag['bound']})",
        ),
        ("idle share", f"learner {idle['learner']:.0%}, generator {idle['generator']:.0%}"),
        ("started again", started_again(summary["restarts"])),
        *([("TensorBoard", f"tensorboard --logdir {where}")] if (where := summary["tensorboard"]) else []),
        ("learning curve", summary["learning_curve"] or "not drawn"),
    ]


def best_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the row on the best evaluation, if that is not the one of the last model.

    Example:
        >>> best_rows({"best": {"step": 30, "score": 0.625, "model": "runs/a/models/best-step-000030"}, "model": "m"})
        [('best model', 'step 30, 0.625: runs/a/models/best-step-000030')]
    """
    # A summary of an earlier version names no best model.
    best = summary.get("best")
    if best is None or best["model"] in (None, summary["model"]):
        return []
    return [("best model", f"step {best['step']}, {best['score']:.3f}: {best['model']}")]


def wall_time(summary: Summary) -> str:
    """Return the time of this start, and the time of training, which includes earlier starts of the run.

    Example:
        >>> wall_time({"wall_seconds": 239.0, "training_seconds": 212.0})
        '239 s, of it 212 s training'
        >>> wall_time({"wall_seconds": 39.0, "training_seconds": 74.0, "resumed": True})
        '39 s since it was resumed; 74 s training in all'
    """
    wall, training = f"{summary['wall_seconds']:.0f} s", f"{summary['training_seconds']:.0f} s training"
    # A summary of an earlier version does not say whether the run was resumed.
    resumed = summary.get("resumed", summary["training_seconds"] > summary["wall_seconds"])
    return f"{wall} since it was resumed; {training} in all" if resumed else f"{wall}, of it {training}"


def held_out_rows(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows on evaluations: the first and the last one, by accuracy and by return; none without one.

    Example:
        >>> first = {"tag": "before", "step": 0, "tasks": 64, "answered": 64, "accuracy": 0.25, "return_mean": 0.5}
        >>> held_out_rows([first, first | {"step": 10, "accuracy": 1.0, "return_mean": None}])[0]
        ('held-out accuracy', '0.250 at step 0, 1.000 at step 10 (greedy)')
        >>> held_out_rows([first | {"accuracy": None}])
        [('held-out return', '0.500 at step 0 (greedy)')]
    """
    shown = _first_and_last(of_set(evaluations, ""))
    rows = []
    for name, words in (("accuracy", "held-out accuracy"), ("return_mean", "held-out return")):
        if all(e[name] is None for e in shown):
            continue
        figures = [f"{'missing' if e[name] is None else f'{e[name]:.3f}'} at step {e['step']}" for e in shown]
        rows.append((words, f"{', '.join(figures)} (greedy)"))
    unanswered = [e for e in shown if e.get("answered", e["tasks"]) < e["tasks"]]
    rows += [(f"held-out tasks at step {e['step']}", unanswered_text(e)) for e in unanswered]
    return rows + [row for name in _names(evaluations) for row in _set_rows(name, of_set(evaluations, name))]


def _names(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for e in evaluations if (name := str(e.get("set", "")))))


def _first_and_last(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [evaluations[i] for i in sorted({0, len(evaluations) - 1})] if evaluations else []


def _set_rows(name: str, evaluations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the row of a named set: what its first and its last evaluation found."""
    figures = [f"{set_figures(e)} at step {e['step']}" for e in _first_and_last(evaluations)]
    shown = [(f"evaluation {name}", ", ".join(figures))]
    for e in _first_and_last(evaluations):
        if e["answered"] < e["tasks"] * e["samples"]:
            shown.append((f"answers of {name} at step {e['step']}", unanswered_text(e)))
    return shown


def set_figures(evaluation: Mapping[str, Any]) -> str:
    """Return pass@k of an evaluation in words, or its mean return if nobody says what is right.

    Example:
        >>> set_figures({"pass_at": {"1": [0.5, 0.4, 0.6], "4": [0.75, 0.6, 0.9]}, "return_mean": 1.0})
        'pass@1 0.500, pass@4 0.750'
        >>> set_figures({"pass_at": {}, "return_mean": 1.0}), set_figures({"pass_at": {}, "return_mean": None})
        ('return 1.000', 'missing')
    """
    if evaluation["pass_at"]:
        return ", ".join(f"pass@{k} {estimate[0]:.3f}" for k, estimate in evaluation["pass_at"].items())
    mean = evaluation["return_mean"]
    return "missing" if mean is None else f"return {mean:.3f}"


def unanswered_text(evaluation: Mapping[str, Any]) -> str:
    """Return how many tasks of an evaluation were answered, failed and never run.

    Example:
        >>> unanswered_text({"tasks": 64, "answered": 0, "failed": 60, "not_run": 4, "why": "KeyError: 'a' in t.py:3"})
        "0 of 64 answered, 60 failed, 4 never run: KeyError: 'a' in t.py:3"
    """
    asked = evaluation["tasks"] * evaluation.get("samples", 1)
    parts = [f"{evaluation['answered']} of {asked} answered"]
    for name, words in (("failed", "failed"), ("not_run", "never run")):
        parts += [f"{evaluation[name]} {words}"] if evaluation[name] else []
    return ", ".join(parts) + (f": {evaluation['why']}" if evaluation["why"] else "")


def not_trained(outcomes: Mapping[str, int], trained: int) -> str:
    """Return what share of the trajectories was not trained, by reason; evaluation is left out.

    Example:
        >>> not_trained({"uniform": 900, "evaluated": 64, "stale": 20}, 80)
        'uniform 90 %, stale 2 %'
    """
    reasons = {name: n for name, n in outcomes.items() if n and name not in ("evaluated", RECOMMITTED)}
    every = sum(reasons.values()) + trained
    largest = sorted(reasons.items(), key=lambda reason: -reason[1])
    return ", ".join(f"{name} {percent(n, every)}" for name, n in largest) or "none"


def started_again(restarts: Mapping[str, int]) -> str:
    """Return the number of restarts by role, in words.

    Example:
        >>> started_again({"broker": 1, "learner": 0, "actor": 3}), started_again({"actor": 0})
        ('1 broker, 3 actor', 'nobody')
    """
    return ", ".join(f"{count} {role}" for role, count in restarts.items() if count) or "nobody"
