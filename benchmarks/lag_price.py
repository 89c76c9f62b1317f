"""What lag buys: mean lag, idle shares and time to equal reward, for bounds on lag and for as little as is needed.

    python -m benchmarks.lag_price [--tasks uniform heavy tools] [--arms 0 1 2 4 needed] [--seeds 0 1]
                                   [--minutes M] [--out FILE.jsonl] [--plot FILE.png] [--json FILE]

Arm "0" is lockstep, the numbers are bounds (`learner.max_policy_lag`), and "needed" is `learner.under_way = "needed"`
below the bound of four versions that is the default. Tasks are arms of benchmarks/async_vs_sync.py, with its settings,
clock and held-out evaluations; only the bound differs. Broker, generator and actor of a task and seed serve all arms
one after the other, and odd seeds take them in reverse order.

Each finished run is one line of FILE.jsonl, and is not repeated unless settings have changed since.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.async_vs_sync import (
    ARMS as TASKS,
)
from benchmarks.async_vs_sync import (
    SETTINGS,
    SNAPSHOTS,
    Run,
    configured,
    fingerprint,
    read,
    reward_ratio,
    token_ratio,
    train,
)
from benchmarks.real_system import running
from benchmarks.report import pyplot, save_results, spread
from launch.model import prepare
from launch.run_file.load import load

LOCKSTEP, DEFAULT, NEEDED = "0", "4", "needed"
ARMS = (LOCKSTEP, "1", "2", DEFAULT, NEEDED)
COLOURS = dict(zip(ARMS, ("#444444", "#9ecae1", "#4292c6", "#08519c", "#d62728"), strict=True))


def overrides(arm: str, minutes: float) -> list[str]:
    """Return the settings of an arm.

    Example:
        >>> overrides("needed", 1.0)
        ['learner.max_policy_lag=4', 'run.max_minutes=1.0', 'learner.under_way=needed']
    """
    bound = DEFAULT if arm in (LOCKSTEP, NEEDED) else arm
    under_way = ["learner.under_way=needed"] if arm == NEEDED else []
    return [f"learner.max_policy_lag={bound}", f"run.max_minutes={minutes}", *under_way]


def run_all(args: argparse.Namespace) -> list[Run]:
    """Make the runs that have no result yet. Return all requested runs; ``mode`` is the arm."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    found = read(out.read_text(encoding="utf-8").splitlines()) if out.exists() else []
    prints = {(t, a): fingerprint(t, overrides(a, args.minutes)) for t in args.tasks for a in args.arms}

    def known(task: str, seed: int) -> set[str]:
        return {
            r.mode for r in found if (r.arm, r.seed, r.settings) == (task, seed, prints.get((task, r.mode)))
        }

    model = str(prepare(load(SETTINGS)))
    for seed in args.seeds:
        for task in args.tasks:
            missing = [arm for arm in args.arms if arm not in known(task, seed)]
            if not missing:
                continue
            with running(configured(task, "async", seed, model, overrides(DEFAULT, args.minutes))) as system:
                for arm in missing if seed % 2 == 0 else reversed(missing):
                    mode = "sync" if arm == LOCKSTEP else "async"
                    config = configured(task, mode, seed, model, overrides(arm, args.minutes))
                    run = train(
                        system,
                        config,
                        arm=task,
                        settings=prints[task, arm],
                        steps=TASKS[task][0],
                        kept=SNAPSHOTS,
                    )
                    run = replace(run, mode=arm)
                    with open(out, "a", encoding="utf-8") as lines:
                        lines.write(json.dumps(asdict(run)) + "\n")
                    found.append(run)
                    sys.stderr.write(
                        f"{time.strftime('%H:%M:%S')} seed {seed} {_row(task, arm, [run], [])}\n"
                    )
    return [r for r in found if r.seed in args.seeds and r.settings == prints.get((r.arm, r.mode))]


def table(runs: Sequence[Run]) -> str:
    """Return the runs as a Markdown table, a row for each task and arm."""
    lines = [
        "| task | bound | mean lag, most | idle learner | idle generator | s per step | trained tokens/s "
        "| tokens: lockstep's time over this | reward: lockstep's time over this | others' cores |",
        "|---" * 10 + "|",
    ]
    for task in TASKS:
        lockstep = [run for run in runs if (run.arm, run.mode) == (task, LOCKSTEP)]
        for arm in ARMS:
            own = [run for run in runs if (run.arm, run.mode) == (task, arm)]
            if own:
                lines.append(_row(task, arm, own, lockstep))
    return "\n".join(lines)


def _row(task: str, arm: str, runs: Sequence[Run], lockstep: Sequence[Run]) -> str:
    base = {run.seed: run for run in lockstep}
    both = [(base[run.seed], run) for run in runs if run.seed in base and arm != LOCKSTEP]
    cells = [
        f"{spread([run.lag_mean for run in runs])}, {max(run.lag_max for run in runs)}",
        f"{statistics.median(run.idle_learner for run in runs):.0%}",
        f"{statistics.median(run.idle_generator for run in runs):.0%}",
        spread([run.seconds / len(run.steps) for run in runs]),
        spread([run.steps[-1].tokens / run.seconds for run in runs], 0),
        spread([token_ratio(*pair) for pair in both], wanted=len(both)),
        spread([reward_ratio(*pair) for pair in both], wanted=len(both)),
        spread([run.cpu.get("others") for run in runs]),
    ]
    return f"| {task} | {arm} | {' | '.join(cells)} |"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot the mean lag over the learner's idle share: a panel for each task, a point for each run."""
    plt = pyplot()
    tasks = [task for task in TASKS if any(run.arm == task for run in runs)]
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(3.4 * len(tasks), 3.0), layout="constrained", squeeze=False
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        for arm in ARMS:
            own = [run for run in runs if (run.arm, run.mode) == (task, arm)]
            if own:
                axis.plot(
                    [100 * run.idle_learner for run in own],
                    [run.lag_mean for run in own],
                    "D" if arm == NEEDED else "o",
                    color=COLOURS[arm],
                    label="as needed" if arm == NEEDED else f"bound {arm}",
                )
        axis.set_title(task, fontsize=10)
        axis.set_xlabel("idle learner, %", fontsize=8)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=-0.1)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean lag, versions", fontsize=8)
    axes[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def headlines(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return what is kept of the default's lag where as little as needed is under way, per task."""
    rows = []
    for task in TASKS:
        arms = {(run.seed, run.mode): run for run in runs if run.arm == task}
        pairs = [
            (arms[s, NEEDED], arms[s, DEFAULT]) for s, arm in arms if arm == NEEDED and (s, DEFAULT) in arms
        ]
        if pairs:
            shares = [needed.lag_mean / bound.lag_mean for needed, bound in pairs if bound.lag_mean]
            rows.append(
                (f'mean lag with under_way = "needed", task `{task}`', "the bound of 4", spread(shares))
            )
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["uniform", "heavy", "tools"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--minutes", type=float, default=0.75, help="longest training of a run; default: 0.75"
    )
    parser.add_argument("--out", type=Path, default=Path("build/lag_price.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    runs = run_all(args)
    sys.stdout.write(table(runs) + "\n")
    if args.json is not None:
        save_results(args.json, {"arms": table(runs)}, [asdict(run) for run in runs], headlines(runs))
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
