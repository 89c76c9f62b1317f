"""Measure what methods do for the tasks that they were made for.

    python -m benchmarks.claims [--claims GDPO OTC ...] [--seeds 0 1 2 3 4] [--budget N]
                                [--out FILE.jsonl] [--json FILE.json] [--plot FILE.png]
                                [--only-finished] [--smoke]

The real system runs in lockstep: vLLM samples, DeepSpeed trains, and each batch lags by exactly one version. One
broker, generator and actor serve all arms of a task, one after the other. All arms begin from the same weights, and
those with equal seeds get the same tasks. A run ends when its batches have a fixed number of sampled tokens, or of
steps of the environment, so that arms that use less get more batches. The bars are in benchmarks/claims/claims.py. A
claim that fails is printed as one that did not help here.

Each finished run is one line of FILE.jsonl. The benchmark does not repeat it unless a setting has changed since. With
--only-finished it starts nothing and shows what the file holds.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.claims.claims import BUDGETS, CLAIMS, Budget, arms_of, configured
from benchmarks.claims.table import Cell, cell_from, measure, plot, settings_of, tables, value_of
from benchmarks.real_system import running
from benchmarks.report import save_results

SEEDS = (0, 1, 2, 3, 4)


def run_all(args: argparse.Namespace) -> list[Cell]:
    """Make the runs that have no result yet. Return all requested results."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    known = [cell_from(json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    arms = arms_of([claim for claim in CLAIMS if claim.name in args.claims])
    configs = {arm.name: configured(arm) for arm in arms}
    budgets = {
        arm.name: Budget(args.budget or BUDGETS[arm.task].amount, BUDGETS[arm.task].unit) for arm in arms
    }
    prints = {name: settings_of(config, budgets[name]) for name, config in configs.items()}
    found = {(c.arm, c.seed): c for c in known if c.seed in args.seeds and prints.get(c.arm) == c.settings}
    for _, group in groupby(arms, key=lambda arm: arm.task):
        names = [arm.name for arm in group]
        missing = [(seed, name) for seed in args.seeds for name in names if (name, seed) not in found]
        if not missing or args.only_finished:
            continue
        with running(configs[names[0]]) as system:
            for seed, name in missing:
                cell = measure(system, configs[name], name, seed, budgets[name])
                found[name, seed] = cell
                with open(out, "a") as lines:
                    lines.write(json.dumps(asdict(cell)) + "\n")
                sys.stderr.write(_progress(cell) + "\n")
    return list(found.values())


def _progress(cell: Cell) -> str:
    return (
        f"{time.strftime('%H:%M:%S')} {cell.arm} seed {cell.seed}: {cell.curve[0].solved:.3f} -> "
        f"{value_of(cell, 'final'):.3f} solved, {value_of(cell, 'calls'):.2f} calls, {len(cell.curve)} steps "
        f"in {cell.seconds:.0f} s, exact {cell.exact}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("--claims", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--budget", type=int, help="tokens or steps of every run, in place of those of its task"
    )
    parser.add_argument("--out", type=Path, default=Path("build/claims.jsonl"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--only-finished", action="store_true", help="show the runs in FILE.jsonl, start none"
    )
    parser.add_argument("--smoke", action="store_true", help="one claim, one seed, a few steps")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.claims, args.seeds, args.budget = ["GDPO"], [0], 1_000
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    cells = run_all(args)
    made = tables(cells, [claim for claim in CLAIMS if claim.name in args.claims])
    sys.stdout.write("\n\n".join(made.values()) + "\n")
    if args.json is not None:
        save_results(args.json, made, [_shown(cell) for cell in cells])
    if args.plot is not None:
        plot(cells, args.plot)
    if wrong := [cell for cell in cells if not cell.exact]:
        sys.exit(f"{len(wrong)} runs in which tokens did not lag as forced")


def _shown(cell: Cell) -> dict[str, Any]:
    """Return a run for the published file: its numbers, without the batches."""
    numbers = {name: round(value_of(cell, name), 4) for name in ("final", "area", "calls", "cost", "flawed")}
    rest = {k: v for k, v in asdict(cell).items() if k != "curve"}
    last = cell.curve[-1]
    used = {"tokens": last.tokens, "environment_steps": last.steps, "repeated_steps": last.repeated}
    return {**rest, **numbers, "steps": len(cell.curve), **used}
