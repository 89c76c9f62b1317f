"""Measure how long the busier side of a shipped recipe stands idle.

    python -m benchmarks.endtoend [RECIPE] [--seeds 0 1 2] [--minutes M] [--set section.field=value ...]
                                  [--out FILE.jsonl]

The benchmark runs `offbeat train` on the recipe once per seed. A run ends after its steps, or after M minutes
of training. The printed share belongs to the side (learner or generator) that was idle less. The learner is
idle while it waits for a batch, the generator while no request runs. Both are shares of the wall time of
learner steps, which includes checkpoints but not evaluations.

Each finished run is one line of FILE.jsonl. Beside the file are the terminal's output and the learning curve.
The benchmark does not repeat a run unless settings have changed since.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import save_results
from launch.run_file.load import located
from launch.supervise.summary import read_metrics

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]


def run(recipe: Path, seed: int, overrides: Sequence[str], log: Path) -> Result:
    """Run the recipe once and return the figures that the table needs.

    Args:
        log: file for what the terminal shows. The learning curve is put beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run.dir={folder}", "run.name=run", f"run.seed={seed}"]
        command = [sys.executable, "-m", "launch.cli", "train", str(recipe), *overrides, *own]
        with open(log, "w", encoding="utf-8") as output:
            subprocess.run(command, cwd=ROOT, check=True, stdout=output)
        shutil.copyfile(Path(folder) / "run" / "learning_curve.png", log.with_suffix(".png"))
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
        result = json.loads((Path(folder) / "run" / "result.json").read_text(encoding="utf-8"))
        lines = [line for line in read_metrics(Path(folder) / "run") if "learner/policy_version" in line]
    return digest(summary, result, lines)


def digest(summary: Result, result: Result, lines: Sequence[dict[str, float]]) -> Result:
    """Return the figures of one run, from its summary, the learner's result and its lines of metrics."""
    seconds = result["step_seconds"]
    idle = summary["idle_share"]
    updates = result["update_seconds"] / seconds
    return {
        "steps": summary["steps"],
        "seconds": seconds,
        "tokens_per_second": summary["tokens_trained"] / seconds,
        "generated_per_trained": summary["tokens_generated"] / max(1, summary["tokens_trained"]),
        "learner": idle["learner"],
        "generator": idle["generator"],
        "busier": min(idle["learner"], idle["generator"]),
        "update": updates,
        "publish": result["publish_seconds"] / seconds,
        "rest": 1 - idle["learner"] - updates - result["publish_seconds"] / seconds,
        "lag_mean": summary["policy_lag"]["mean_versions"],
        "running_requests": statistics.mean(line.get("generator/running_requests", 0.0) for line in lines),
        "accuracy": summary["accuracy"]["after"],
    }


def fingerprint(recipe: Path, overrides: Sequence[str]) -> str:
    """Return a hash of everything that a run depends on, except its seed."""
    text = json.dumps([recipe.read_text(encoding="utf-8"), list(overrides)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one line per seed, and the median."""
    rows = [
        "| seed | idle: busier side | learner | generator | update / publish / rest | steps | trained tokens/s "
        "| lag mean | accuracy after |",
        "|---" * 9 + "|",
    ]
    for r in results:
        accuracy = "-" if r["accuracy"] is None else f"{r['accuracy']:.3f}"
        rows.append(
            f"| {r['seed']} | **{r['busier']:.1%}** | {r['learner']:.1%} | {r['generator']:.1%} "
            f"| {r['update']:.0%} / {r['publish']:.0%} / {r['rest']:.0%} | {r['steps']} "
            f"| {r['tokens_per_second']:,.0f} | {r['lag_mean']:.2f} | {accuracy} |"
        )
    busier = [r["busier"] for r in results]
    rows.append(
        f"| median | **{statistics.median(busier):.1%}** [{min(busier):.1%}, {max(busier):.1%}] |" + " |" * 7
    )
    return "\n".join(rows)


def run_all(args: argparse.Namespace) -> list[Result]:
    """Run the seeds that have no result yet. Return the results of all requested seeds."""
    recipe = located(Path(args.recipe))
    overrides = [*args.set, *([f"run.max_minutes={args.minutes}"] if args.minutes else [])]
    settings = fingerprint(recipe, overrides)
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    known = list(map(json.loads, out.read_text(encoding="utf-8").splitlines())) if out.exists() else []
    found = {r["seed"]: r for r in known if r["settings"] == settings}
    for seed in args.seeds:
        if seed in found:
            continue
        figures = run(recipe, seed, overrides, out.with_name(f"{out.stem}-{recipe.stem}-{seed}.log"))
        found[seed] = {"seed": seed, "settings": settings, "overrides": overrides} | figures
        with open(out, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(found[seed]) + "\n")
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {json.dumps(found[seed])}\n")
    return [found[seed] for seed in args.seeds]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="spell_backward")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of training; 0: as long as the recipe says"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="section.field=value")
    parser.add_argument("--out", type=Path, default=Path("build/endtoend.jsonl"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    runs = run_all(args)
    sys.stdout.write(table(runs) + "\n")
    if args.json is not None:
        save_results(args.json, {"idle": table(runs)}, runs)


if __name__ == "__main__":
    main()
