"""Run a whole shipped recipe once per seed and print all results, to see whether it learns on every seed.

    python -m benchmarks.seeds [RECIPE] [--seeds 0 1 2] [--models] [--json FILE.json]

All seeds start from the recipe's warm-started model. With --models each seed makes its own model.
Accuracy is measured on held-out tasks with greedy sampling.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import save_results

ROOT = Path(__file__).parents[1]
PATHS = {"tensorboard", "learning_curve", "model"}
"""Fields of a summary that name files of the run's folder, which is deleted."""


def run(recipe: str, seed: int, folder: Path, *, models: bool) -> dict[str, Any]:
    """Run the recipe once and return the summary of the run."""
    overrides = [f"run.dir={folder}", f"run.name=seed{seed}", f"run.seed={seed}"]
    overrides += [f"model.tiny.seed={seed}"] if models else []
    command = [
        sys.executable,
        "-m",
        "launch.cli",
        "train",
        recipe,
        *overrides,
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / f"seed{seed}" / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name not in PATHS}


def table(summaries: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one line per seed, and the median."""
    lines = [
        "| seed | before | after | steps | minutes | tokens sampled | lag mean / max | idle (learner / generator) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        if None in (s["accuracy"]["before"], s["accuracy"]["after"]):
            raise ValueError(
                f"seed {s['seed']} has no accuracy before or after, because tasks were never run"
            )
        lag, idle = s["policy_lag"], s["idle_share"]
        lines.append(
            f"| {s['seed']} | {s['accuracy']['before']:.3f} | {s['accuracy']['after']:.3f} | {s['steps']} "
            f"| {s['wall_seconds'] / 60:.1f} | {s['tokens_generated']:,} "
            f"| {lag['mean_versions']:.2f} / {lag['max_versions']} | {idle['learner']:.0%} / {idle['generator']:.0%} |"
        )
    before, after = ([s["accuracy"][k] for s in summaries] for k in ("before", "after"))
    lines.append(f"| median | {statistics.median(before):.3f} | {statistics.median(after):.3f} | | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="spell_backward")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        summaries = [run(args.recipe, seed, Path(folder), models=args.models) for seed in args.seeds]
    sys.stdout.write(table(summaries) + "\n")
    if args.json:
        save_results(args.json, {"seeds": table(summaries)}, summaries)


if __name__ == "__main__":
    main()
