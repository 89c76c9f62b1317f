"""Tables and the plot of benchmarks/versus_trl/program.py."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import pyplot
from benchmarks.versus_trl.runs import curve, ratio, seconds_to, spread, step_seconds, tokens_per_second
from benchmarks.versus_trl.tasks import ARMS, TASKS


def measures(result: dict[str, Any]) -> dict[str, float | None]:
    """Return the compared figures of one run."""
    settings = TASKS[result["task"]]
    return {
        "tokens": tokens_per_second(result["steps"]),
        "step": step_seconds(result["steps"]),
        "level": seconds_to(curve(result["rewards"], settings.window), settings.level),
        "startup": result["startup"],
        "steps": float(len(result["steps"])),
    }


def brief(result: dict[str, Any]) -> str:
    """Return one line of text about one run."""
    found = measures(result)
    points = curve(result["rewards"], TASKS[result["task"]].window) or [(0.0, 0.0)]
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result["phases"].items())
    told = ", ".join(f"{name} {value and round(value, 3)}" for name, value in found.items())
    return f"{told}; reward {points[0][1]:.3f} -> {points[-1][1]:.3f}; a step: {phases}; {result['notes']}"


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Return Markdown tables for each task: the figures of each arm, and ours over each of TRL's arms."""
    return "\n\n".join(
        block
        for task in TASKS
        if (of_task := [r for r in results if r["task"] == task])
        for block in (_arms_table(task, of_task), _ratio_table(task, of_task))
        if block
    )


def _by_seed(results: Sequence[dict[str, Any]], arm: str, what: str) -> list[float | None]:
    seeds = sorted({r["seed"] for r in results})
    found = {r["seed"]: measures(r)[what] for r in results if r["arm"] == arm}
    return [found.get(seed) for seed in seeds]


def _present(results: Sequence[dict[str, Any]], *, ours: bool) -> list[str]:
    return [name for name, arm in ARMS.items() if arm.ours == ours and any(r["arm"] == name for r in results)]


def _arms_table(task: str, results: Sequence[dict[str, Any]]) -> str:
    level = TASKS[task].level
    rows = [
        f"**{task}** (median, in brackets least and most over seeds)",
        "",
        f"| arm | trained tokens/s | seconds a step | seconds to reward {level:g} | steps | start-up, s | runs |",
        "|---" * 7 + "|",
    ]
    for arm in (*_present(results, ours=False), *_present(results, ours=True)):
        values = {
            what: _by_seed(results, arm, what) for what in ("tokens", "step", "level", "steps", "startup")
        }
        count = sum(r["arm"] == arm for r in results)
        rows.append(
            f"| {arm} | {spread(values['tokens'], 0)} | {spread(values['step'], 3)} "
            f"| {spread(values['level'], 1, wanted=count)} | {spread(values['steps'], 0)} "
            f"| {spread(values['startup'], 0)} | {count} |"
        )
    return "\n".join(rows)


def _ratio_table(task: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the table of our arms over TRL's arms, or "" if one side has no runs."""
    peers, ours = _present(results, ours=False), _present(results, ours=True)
    if not peers or not ours:
        return ""
    rows = [
        f"**{task}: ours over TRL's** (tokens/s; time to the reward; per seed, then median)",
        "",
        "| | " + " | ".join(f"over {peer}" for peer in peers) + " |",
        "|---" * (len(peers) + 1) + "|",
    ]
    for arm in ours:
        cells = []
        for peer in peers:
            speed = ratio(_by_seed(results, arm, "tokens"), _by_seed(results, peer, "tokens"))
            time_ = ratio(_by_seed(results, peer, "level"), _by_seed(results, arm, "level"))
            cells.append(f"{spread(speed)}; {spread(time_)}")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def headlines(results: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the ratio of each of our arms in trained tokens/s, over the fastest of TRL's arms, for the README."""
    rows = []
    for task in TASKS:
        of_task = [r for r in results if r["task"] == task]
        speeds = {peer: _by_seed(of_task, peer, "tokens") for peer in _present(of_task, ours=False)}
        if not speeds:
            continue
        fastest = max(speeds, key=lambda peer: statistics.median(s for s in speeds[peer] if s is not None))
        for arm in _present(of_task, ours=True):
            over = spread(ratio(_by_seed(of_task, arm, "tokens"), speeds[fastest]))
            rows.append((f"trained tokens/s, task `{task}`, arm `{arm}`", f"TRL, arm `{fastest}`", over))
    return rows


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the reward over wall time, with one panel per task, one colour per arm and one line per seed."""
    plt = pyplot()
    tasks = [task for task in TASKS if any(r["task"] == task for r in results)]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(5 * len(tasks), 4), layout="constrained", squeeze=False
    )
    colours = dict(zip(ARMS, plt.get_cmap("tab10").colors, strict=False))
    for axes, task in zip(panels[0], tasks, strict=True):
        labelled = set()
        for result in (r for r in results if r["task"] == task):
            arm, points = result["arm"], curve(result["rewards"], TASKS[task].window)
            if points:
                label = None if arm in labelled else arm
                axes.plot(*zip(*points, strict=True), color=colours[arm], label=label, linewidth=1.3)
                labelled.add(arm)
        axes.axhline(TASKS[task].level, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel="seconds since the first step", ylabel="mean reward", title=task)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
