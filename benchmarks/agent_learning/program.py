"""Train an unchanged langgraph agent with three tools, and measure it on tasks that it has not seen.

    python -m benchmarks.agent_learning [--seeds 0 1 2] [--set section.field=value ...]
                                        [--json FILE.json] [--plot FILE.png]

The agent is a program in a virtual environment of its own under build/harnesses, which is made if it is not there. It
calls one of three tools, and gives its result. The model has seen mostly calls of wrong tools; which tool a question
wants is what it learns. All seeds start from one warm-started model. Each seed is a run of `offbeat train` in
build/agent_learning/runs. A seed whose run has ended is not run again, and a run that was interrupted is resumed.
Accuracy is the share of 64 held-out tasks that greedy sampling solves. The load of the machine is its run queue over 15
minutes when a seed has ended.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.agent_learning.rows import write_rows
from benchmarks.report import ROOT, measured, pyplot, save_results
from tests.campaigns.harnesses.program import programs_of

RUN_FILE = Path(__file__).with_name("agent_learning.toml")
FOLDER = ROOT / "build" / "agent_learning"
RUNS = FOLDER / "runs"
RETURN, LAG, LAG_MAX = (
    "rollout/return_mean",
    "learner/policy_lag_mean_versions",
    "learner/policy_lag_max_versions",
)
WINDOW = 8
"""Steps of the moving means in the picture."""


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    write_rows(FOLDER)
    programs_of("langgraph", ROOT / "build" / "harnesses")
    results = [seed_result(seed, args.set) for seed in args.seeds]
    sys.stdout.write(table(results) + "\n")
    if args.plot is not None:
        plot(results, args.plot)
    if args.json is not None:
        save_results(args.json, {"seeds": table(results)}, results)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="section.field=value")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args(arguments)


def seed_result(seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the result of a seed, which is run or resumed if it has none yet."""
    folder = RUNS / f"seed{seed}"
    kept = folder / "figures.json"
    if not kept.exists():
        if not (folder / "summary.json").exists():
            train(seed, folder, overrides)
        summary = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept.write_text(json.dumps(result_of(summary, lines) | {"load": os.getloadavg()[2]}))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def train(seed: int, folder: Path, overrides: Sequence[str]) -> None:
    """Train one seed, from where an earlier run of it was interrupted, if there was one."""
    settings = [f"run.dir={RUNS}", f"run.name={folder.name}", f"run.seed={seed}", *overrides]
    settings += ["--resume"] if (folder / "metrics.jsonl").exists() else []
    command = [sys.executable, "-m", "launch.cli", "train", str(RUN_FILE), *settings]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def result_of(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the table and the picture show of a run.

    Args:
        summary: the run's summary.json.
        lines: lines of its metrics.jsonl.
    """
    return {
        "seed": summary["seed"],
        "evaluations": [
            {"step": evaluation["step"], "accuracy": measured(evaluation, "accuracy")}
            for evaluation in summary["evaluations"]
        ],
        "tasks": summary["accuracy"]["tasks"],
        "steps": summary["steps"],
        "seconds": summary["training_seconds"],
        "episodes": summary["episodes"],
        "tokens_trained": summary["tokens_trained"],
        "policy_lag": summary["policy_lag"],
        "curves": {
            name: [[line["step"], line[name]] for line in lines if line.get(name) is not None]
            for name in (RETURN, LAG, LAG_MAX)
        },
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with one line per seed, and the medians."""
    lines = [
        "| seed | held-out solved, before | after | steps | minutes | episodes (failed) | tokens trained "
        "| lag of tokens, mean / max (bound) | load |",
        "|---" * 9 + "|",
    ]
    for r in results:
        before, after = (r["evaluations"][end]["accuracy"] for end in (0, -1))
        lag, episodes = r["policy_lag"], r["episodes"]
        lines.append(
            f"| {r['seed']} | {before:.2f} | {after:.2f} | {r['steps']} | {r['seconds'] / 60:.1f} "
            f"| {episodes['episodes']:,} ({episodes['failed']}) | {r['tokens_trained']:,} "
            f"| {lag['mean_versions']:.2f} / {lag['max_versions']} ({lag['bound']}) | {r['load']:.0f} |"
        )
    before, after = (statistics.median(r["evaluations"][end]["accuracy"] for r in results) for end in (0, -1))
    lines.append(f"| median | {before:.2f} | {after:.2f} | | | | | | |")
    return "\n".join(lines)


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the share of right answers, sampled and held out, and below it the policy lag of the trained tokens."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.4), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for number, result in enumerate(results):
        colour = f"C{number}"
        steps, values = zip(*result["curves"][RETURN], strict=True)
        top.plot(steps, moving_mean(values), color=colour, alpha=0.45, linewidth=1.2)
        held = result["evaluations"]
        accuracies = [evaluation["accuracy"] for evaluation in held]
        top.plot(
            [evaluation["step"] for evaluation in held], accuracies, color=colour, marker="D", markersize=4,
            label=f"seed {result['seed']}: {accuracies[0]:.2f} to {accuracies[-1]:.2f}",
        )  # fmt: skip
        steps, lags = zip(*result["curves"][LAG], strict=True)
        bottom.plot(steps, moving_mean(lags), color=colour, linewidth=1.5)
        steps, largest = zip(*result["curves"][LAG_MAX], strict=True)
        bottom.plot(steps, largest, color=colour, linewidth=0, marker=".", markersize=2, alpha=0.5)
    tasks = results[0]["tasks"]
    top.set_title(
        f"diamonds: {tasks} held-out tasks, greedy; thin: sampled in training", loc="left", fontsize=10
    )
    top.set(ylabel="share solved", ylim=(0, 1.02))
    top.legend(frameon=False, fontsize=9)
    bottom.set(xlabel="learner step", ylabel="policy lag of tokens,\nmean (line), max (dots)")
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the last `WINDOW` values up to it.

    Example:
        >>> moving_mean([0.0, 1.0])
        [0.0, 0.5]
    """
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [statistics.fmean(window) for window in windows]
