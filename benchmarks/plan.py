"""Check `offbeat plan`: measure the rates once, then compare its forecasts for other settings with real runs.

    python -m benchmarks.plan recipes/spell_backward.toml --calibrate 30 --json build/plan.json

Each arm is a run of the real system without evaluations, for --seconds after its start. The measurement
leaves out the same warm-up steps as the plan, but at most a third of the steps. Arms that the file of --json has
already are not run again; what the plan says of them is computed anew. docs/run/capacity.md has the results.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import save_results
from launch.plan.command import COMPARED
from launch.plan.rates import load_rates
from launch.plan.simulation import WARM_UP_STEPS, setting_of, simulate
from launch.run_file.load import load
from launch.supervise.summary import generator_idle_share, read_metrics

ARMS = {
    "as calibrated": (),
    "fewer episodes": ("actor.count=1", "actor.concurrent_episodes=16"),
    "smaller batch": ("learner.batch_trajectories=32",),
    "lockstep": ("run.mode=sync",),
}
WITHOUT_END = ("learner.evaluation_tasks=0", "learner.steps=1000000")
START_S = 20.0
LEAST_STEPS = 3


def command(*arguments: str) -> None:
    """Run an `offbeat` command. An error of the command ends the benchmark."""
    subprocess.run([sys.executable, "-m", "launch.cli", *arguments], check=True)


def measured(run: Path, warm_up: int) -> dict[str, float]:
    """Return a run's figures without its first ``warm_up`` steps, or a third of the steps if that is less."""
    result = json.loads((run / "result.json").read_text())
    steps = [line for line in read_metrics(run) if "learner/step_seconds" in line]
    if len(steps) < LEAST_STEPS:
        sys.exit(
            f"{run}: {len(steps)} steps, at least {LEAST_STEPS} are needed; give --seconds more than this"
        )
    walls = [line["learner/trained_tokens"] / line["learner/trained_tokens_per_second"] for line in steps]
    skipped = max(1, min(warm_up, len(steps) // 3))
    # A metrics line leaves out the time between its writing and the next step: mostly a checkpoint.
    after = (result["step_seconds"] - sum(walls)) / len(steps)
    lines, seconds = steps[skipped:], sum(walls[skipped:]) + after * len(steps[skipped:])
    tokens = sum(line["learner/trained_tokens"] for line in lines)
    return {
        "steps": len(lines),
        "seconds": seconds,
        "trained_tokens_per_second": tokens / seconds,
        "steps_per_second": len(lines) / seconds,
        "lag_mean_versions": sum(
            line["learner/policy_lag_mean_versions"] * line["learner/trained_tokens"] for line in lines
        )
        / tokens,
        "learner_idle_share": sum(line["learner/wait_seconds"] for line in lines) / seconds,
        "generator_idle_share": generator_idle_share(steps[skipped - 1 :]),
    }


def arm(recipe: Path, name: str, folder: Path, seconds: float) -> dict[str, float]:
    """Run one arm. Return the measured figures."""
    label = f"{recipe.stem}-{name.replace(' ', '-')}"
    overrides = [
        *ARMS[name],
        *WITHOUT_END,
        f"run.name={label}",
        f"run.dir={folder}",
        f"run.max_minutes={(seconds + START_S) / 60:.3f}",
    ]
    command("train", str(recipe), *overrides)
    run = max(folder.glob(f"{label}*"), key=lambda path: path.stat().st_mtime)
    return measured(run, WARM_UP_STEPS + setting_of(load(recipe, overrides)).max_policy_lag)


def forecast(recipe: Path, rates: Path, name: str) -> dict[str, Any]:
    """Return what the plan says of one arm."""
    setting = setting_of(load(recipe, [*ARMS[name], *WITHOUT_END]))
    return asdict(simulate(load_rates(rates), setting))


def kept_arms(results: Path | None, recipe: Path) -> dict[str, dict[str, float]]:
    """Return the measured figures of a recipe's arms that a file of results has, by arm."""
    if results is None or not results.is_file():
        return {}
    rows = json.loads(results.read_text(encoding="utf-8"))["results"]
    return {row["arm"]: row["measured"] for row in rows if row["recipe"] == recipe.stem}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table as lines: measured and predicted values and, for rates, their difference."""
    lines = ["| recipe | arm | " + " | ".join(COMPARED.values()) + " |", "|" + "---|" * (2 + len(COMPARED))]
    for row in rows:
        cells = []
        for name in COMPARED:
            was, would = row["measured"][name], row["predicted"][name]
            if name.endswith("_share"):
                cells.append(f"{was:.0%} / {would:.0%}")
            elif name == "lag_mean_versions":
                cells.append(f"{was:.2f} / {would:.2f}")
            else:
                cells.append(f"{was:.4g} / {would:.4g} ({would / was - 1:+.0%})")
        lines.append(f"| {row['recipe']} | {row['arm']} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Calibrate, run all arms, and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument(
        "--calibrate", type=float, default=30.0, help="seconds; 0: the rates are there already"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--folder", type=Path, default=Path("build/plan"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rates = arguments.folder / f"{arguments.recipe.stem}-rates.toml"
    if arguments.calibrate:
        run = [f"run.dir={arguments.folder}"]
        command(
            "plan",
            str(arguments.recipe),
            *run,
            "--calibrate",
            f"{arguments.calibrate:g}",
            "--rates",
            str(rates),
        )
    rows, kept = [], kept_arms(arguments.json, arguments.recipe)
    for name in arguments.arms:
        was = kept.get(name) or arm(arguments.recipe, name, arguments.folder, arguments.seconds)
        would = forecast(arguments.recipe, rates, name)
        rows.append({"recipe": arguments.recipe.stem, "arm": name, "measured": was, "predicted": would})
        if arguments.json:
            save_results(arguments.json, {"arms": "\n".join(table(rows))}, rows)
    sys.stdout.write("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
